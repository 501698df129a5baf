"""The progress of a race on the terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from compare.race.plan import PlannedRun, RacePlan, heats_of
from launch.quantities import format_duration

# How much the expectation weighs against what finished runs took, as if it had been seen for so many seconds.
_SECONDS_OF_TRUST = 60.0


class ProgressOfRace:
    """What the race does now, and the remaining time; without a terminal, a line for each run."""

    def __init__(self, plan: RacePlan, left: list[PlannedRun], terminal: Console) -> None:
        """Starts to show the progress.

        Args:
            plan: The plan of the race.
            left: The runs that are not finished yet.
            terminal: Where to show it.
        """
        self._plan, self._terminal = plan, terminal
        self._num_runs = len(plan.runs())
        self._left = heats_of(left)
        self._expected = self._taken = _SECONDS_OF_TRUST
        self._began = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=terminal,
            disable=not terminal.is_terminal,
        )
        done = self._num_runs - len(left)
        self._task = self._bar.add_task("", total=self._num_runs, completed=done, left="")
        # Nothing is drawn while a run is timed, but when the race has news: drawing takes processor time.
        self._live = Live(console=terminal, auto_refresh=False, transient=True)
        if done:
            terminal.print(f"resuming the race: {done} run(s) are finished already")

    def __enter__(self) -> ProgressOfRace:
        if self._terminal.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def begin(self, heat: list[PlannedRun]) -> None:
        """Shows that runs are about to begin, all at once."""
        self._began = time.monotonic()
        run = heat[0]
        who = run.entrant.label if len(heat) == 1 else f"{len(heat)} entrants"
        self._show(f"{run.purpose}, block {run.block}: starting {who}" if run.block else f"{run.purpose}: {who}")

    def say(self, what: str) -> None:
        """Shows what the race waits for, or why it does something again."""
        if self._terminal.is_terminal:
            self._show(what)
        else:
            self._terminal.print(what)

    def begin_round(self, heat: list[PlannedRun], through: int, num_steps: int) -> None:
        """Shows that the entrants of a heat begin a round, which goes on through a step of so many."""
        self._show(f"timed, block {heat[0].block}: {len(heat)} entrants take turns, step {through} of {num_steps}")

    def skip(self, heat: list[PlannedRun]) -> None:
        """Notes that runs need not take place any more."""
        self._left.remove(heat)
        self._bar.advance(self._task, len(heat))

    def end(self, heat: list[PlannedRun], reasons: dict[PlannedRun, str | None]) -> None:
        """Shows how runs that took place together ended, with the reason of each that failed, and None of others."""
        seconds = time.monotonic() - self._began
        self._left.remove(heat)
        self._expected += self._seconds(heat)
        self._taken += seconds
        for run, why in reasons.items():
            self._bar.advance(self._task)
            outcome = f"FAILED: {why}" if why else f"{seconds:.0f} s"
            if why or not self._terminal.is_terminal:
                self._terminal.print(f"{run.purpose}: {run.entrant.label}: {outcome}")
        if not self._terminal.is_terminal:
            done = self._num_runs - sum(len(heat) for heat in self._left)
            self._terminal.print(f"[{done}/{self._num_runs}] {self._remaining(0.0)}")

    def _seconds(self, heat: list[PlannedRun]) -> float:
        assert self._plan.costs is not None
        return self._plan.costs.heat(heat, self._plan.options, self._plan.schedule.timed_steps)

    def _remaining(self, seconds_of_this: float) -> str:
        """Estimates the remaining time: as the plan does, corrected by how it was right so far."""
        expected = sum(self._seconds(heat) for heat in self._left) * self._taken / self._expected
        return f"about {format_duration(max(expected - seconds_of_this, 0.0))} left"

    def _show(self, doing: str) -> None:
        if self._terminal.is_terminal:
            self._bar.update(self._task, left=self._remaining(time.monotonic() - self._began))
            self._live.update(Group(Text(doing, overflow="ellipsis", no_wrap=True), self._bar), refresh=True)
