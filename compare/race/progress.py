"""The progress of a race on the terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from compare.race.pace import Pace
from compare.race.plan import PlannedRun
from launch.quantities import format_duration


class ProgressOfRace:
    """What the race does now, and the remaining time; without a terminal, a line for each run."""

    def __init__(self, pace: Pace, num_finished: int, terminal: Console, *, seconds_afterwards: float) -> None:
        """Starts to show the progress.

        Args:
            pace: What is left, and how long it takes.
            num_finished: The number of runs that are finished already.
            terminal: Where to show it.
            seconds_afterwards: How long the race is expected to go on after its runs.
        """
        self._pace, self._terminal = pace, terminal
        self._seconds_afterwards = seconds_afterwards
        self._num_done = num_finished
        self._began = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=terminal,
            disable=not terminal.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._num_runs, completed=num_finished, left="")
        # Nothing is drawn while a run is timed, but when the race has news: drawing takes processor time.
        self._live = Live(console=terminal, auto_refresh=False, transient=True)
        if num_finished:
            terminal.print(f"resuming the race: {num_finished} run(s) are finished already")

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
        self._show(
            f"{run.purpose}, block {run.block}: starting {who}" if run.purpose == "timed" else f"{run.purpose}: {who}"
        )

    def say(self, what: str) -> None:
        """Shows what the race waits for, or why it does something again."""
        if self._terminal.is_terminal:
            self._show(what)
        else:
            self._terminal.print(what)

    def begin_round(self, heat: list[PlannedRun], through: int, num_steps: int) -> None:
        """Shows that the entrants of a heat begin a round, which goes on through a step of so many."""
        self._show(f"timed, block {heat[0].block}: {len(heat)} entrants take turns, step {through} of {num_steps}")

    def end(self, heat: list[PlannedRun], reasons: dict[PlannedRun, str | None]) -> None:
        """Shows how runs that took place together ended, with the reason of each that failed, and None of others."""
        seconds = time.monotonic() - self._began
        self._pace.note(heat, seconds)
        self._num_done += len(heat)
        self._bar.update(self._task, completed=self._num_done, total=self._num_runs)
        for run, why in reasons.items():
            outcome = f"FAILED: {why}" if why else f"{seconds:.0f} s"
            if why or not self._terminal.is_terminal:
                self._terminal.print(f"{run.purpose}: {run.entrant.label}: {outcome}")
        if not self._terminal.is_terminal:
            self._terminal.print(f"[{self._num_done}/{self._num_runs}] {self._remaining(0.0)}")

    @property
    def _num_runs(self) -> int:
        """The number of runs in the end, as far as can be told now."""
        return self._num_done + sum(map(len, self._pace.to_come()))

    def _remaining(self, seconds_of_this: float) -> str:
        expected = self._pace.seconds(self._pace.to_come())
        left = max(expected - seconds_of_this, 0.0) + self._seconds_afterwards
        return f"about {format_duration(left)} left"

    def _show(self, doing: str) -> None:
        if self._terminal.is_terminal:
            self._bar.update(self._task, left=self._remaining(time.monotonic() - self._began))
            self._live.update(Group(Text(doing, overflow="ellipsis", no_wrap=True), self._bar), refresh=True)
