"""The progress of a race on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compare.race.plan import PlannedRun
from launch.quantities import format_duration


class ProgressOfRace:
    """A progress bar with the remaining time or, without a terminal, a line for each run."""

    def __init__(self, num_runs: int, left: list[PlannedRun], terminal: Console) -> None:
        """Starts to show the progress.

        Args:
            num_runs: The number of all runs of the race.
            left: The runs that are not finished yet.
            terminal: Where to show it.
        """
        self._terminal = terminal
        self._left = list(left)
        self._num_runs = num_runs
        self._seconds: dict[str, list[float]] = {}
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=terminal,
            transient=True,
            auto_refresh=False,  # the race must not compute while a run is timed
            disable=not terminal.is_terminal,
        )
        done = num_runs - len(left)
        self._task = self._bar.add_task("", total=num_runs, completed=done, left="")
        if done:
            terminal.print(f"resuming the race: {done} run(s) are finished already")

    def __enter__(self) -> ProgressOfRace:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, run: PlannedRun) -> None:
        """Shows that a run starts."""
        self._bar.update(self._task, description=f"{run.purpose}: {run.entrant.label}", left=self._remaining())
        self._bar.refresh()

    def begin_round(self, runs: list[PlannedRun], through: int, num_steps: int) -> None:
        """Shows that the entrants of a heat begin a round, which goes on through a step of so many."""
        description = f"{len(runs)} entrants take turns, block {runs[0].block}: step {through} of {num_steps}"
        self._bar.update(self._task, description=description, left=self._remaining())
        self._bar.refresh()

    def skip(self, runs: list[PlannedRun]) -> None:
        """Shows that runs need not take place any more."""
        for run in runs:
            self._left.remove(run)
            self._bar.advance(self._task)

    def end(self, reasons: dict[PlannedRun, str | None], seconds: float) -> None:
        """Shows how runs that took place together ended, with the reason of each that failed, and None of others."""
        for run, why in reasons.items():
            self._seconds.setdefault(run.purpose, []).append(seconds / len(reasons))
            self._left.remove(run)
            self._bar.advance(self._task)
            where = f"[{self._num_runs - len(self._left)}/{self._num_runs}]"
            outcome = f"FAILED: {why}" if why else f"{seconds:.0f} s"
            if why or not self._terminal.is_terminal:
                left = "" if self._terminal.is_terminal else f"; {self._remaining()}"
                self._terminal.print(f"{where} {run.purpose}: {run.entrant.label}: {outcome}{left}")

    def _remaining(self) -> str:
        """Estimates the remaining time from the mean time of finished runs, if possible those of the same purpose."""
        seen = [second for seconds in self._seconds.values() for second in seconds]
        if not seen:
            return ""
        overall = sum(seen) / len(seen)
        means = {purpose: sum(seconds) / len(seconds) for purpose, seconds in self._seconds.items()}
        seconds = sum(means.get(run.purpose, overall) for run in self._left)
        return f"about {format_duration(seconds)} left"
