"""The file through which rank 0 reports to the launcher while it runs: one piece of news a line, as JSON.

Ranks print nothing on the user's terminal, since every starter treats their output differently.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from records.names import PROGRESS_NAME
from records.news import News, StepEnded, Warned, parse_news
from records.tracker import TRACKERS

_SECONDS_BETWEEN_STEPS = 0.2


class ProgressLog:
    """Appends news to the progress file of a run; on ranks other than 0 it does nothing.

    Attributes:
        warnings: What the user was warned of so far.
    """

    def __init__(self, directory: Path, *, rank: int, tracker: str = "none") -> None:
        self._file = (directory / PROGRESS_NAME).open("a", buffering=1, encoding="utf-8") if rank == 0 else None
        self._tracker = TRACKERS[tracker](directory / tracker) if rank == 0 and tracker in TRACKERS else None
        self._step_reported_at = 0.0
        self.warnings: list[str] = []

    def write(self, news: News) -> None:
        """Appends one piece of news. On a full disk the news is lost, and the run goes on."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.write(news.model_dump_json() + "\n")
            if self._tracker is not None:
                self._tracker.write(news)

    def warn(self, text: str) -> None:
        """Warns the user, on the terminal and in the record."""
        self.warnings.append(text)
        self.write(Warned(text=text))

    def beat(self, step: int, num_steps: int, loss: float | None) -> None:
        """Reports a finished step (`StepEnded`), unless another one was reported a moment ago."""
        if time.monotonic() - self._step_reported_at >= _SECONDS_BETWEEN_STEPS:
            self._step_reported_at = time.monotonic()
            self.write(StepEnded(step=step, num_steps=num_steps, loss=loss))


class ProgressReader:
    """Reads the progress file of a run, each time what is new since the last time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PROGRESS_NAME
        self._position = 0

    def news(self) -> list[News]:
        """Returns the news that were appended since the last call, without those that cannot be read."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole_lines, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole_lines) + len(newline)
        return [news for line in whole_lines.splitlines() if (news := parse_news(line)) is not None]
