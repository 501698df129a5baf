"""The news that rank 0 writes during a run and the launcher reads: one JSON object a line.

Ranks print nothing on the user's terminal: every launcher treats their output differently.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from records.names import PROGRESS_NAME
from records.tracker import TRACKERS

_SECONDS_BETWEEN_BEATS = 0.2


class ProgressLog:
    """Appends news to the run's progress file; on ranks other than 0 it does nothing."""

    def __init__(self, directory: Path, *, rank: int, tracker: str = "none") -> None:
        self._file = (directory / PROGRESS_NAME).open("a", buffering=1, encoding="utf-8") if rank == 0 else None
        self._tracker = TRACKERS[tracker](directory / tracker) if rank == 0 and tracker in TRACKERS else None
        self._last_beat = 0.0
        self.warnings: list[str] = []

    def write(self, event: str, **facts: Any) -> None:
        """Appends one piece of news. On a full disk it is lost, not the run."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")
            if self._tracker is not None:
                self._tracker.write(event, facts)

    def warn(self, text: str) -> None:
        """Warns the user, on the terminal and in the record."""
        self.warnings.append(text)
        self.write("warning", text=text)

    def beat(self, **facts: Any) -> None:
        """Reports a finished step, unless one was reported a moment ago."""
        if time.monotonic() - self._last_beat >= _SECONDS_BETWEEN_BEATS:
            self._last_beat = time.monotonic()
            self.write("step", **facts)


class ProgressReader:
    """Reads what has been appended since the last look."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PROGRESS_NAME
        self._position = 0

    def news(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole_lines, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole_lines) + len(newline)
        return [fact for line in whole_lines.splitlines() if (fact := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's content; None for one that a full disk has cut and the next has been appended to."""
    try:
        content: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return content
