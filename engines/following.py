"""Follows the commands of the nodes: what they print, and how they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from launch.errors import say, tell
from launch.train_command import STOPPED

_MARK = "lockstep: "


class Followed:
    """The output of all nodes: that of node 0 as it is, of the others what Lockstep tells the user, with their number.

    The nodes write into files, which outlive the job.
    """

    def __init__(self, logs: Sequence[Path]) -> None:
        """Begins at the end of each file.

        Args:
            logs: The file of each node, which may not exist yet.
        """
        self._logs = logs
        self._read = [path.stat().st_size if path.exists() else 0 for path in logs]

    def show(self) -> None:
        """Prints the whole lines that have come since the last call. A job goes on where nobody reads them any more."""
        for node_rank, path in enumerate(self._logs):
            for line in self._new_lines(node_rank, path):
                if line.startswith(_MARK):
                    place = f"node {node_rank}: " if node_rank else ""
                    tell(f"{place}{line.removeprefix(_MARK)}")
                elif node_rank == 0:
                    say(line)

    def _new_lines(self, node_rank: int, path: Path) -> list[str]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[node_rank])
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[node_rank] += len(whole)
        return whole.decode(errors="replace").splitlines()


def exit_code_of(codes: Sequence[int]) -> int:
    """Returns the exit code of a job from those of all nodes, where nobody knows which of them failed first.

    A node that others have waited for in vain fails with 1, as they do, so the largest says most. A job has stopped
    after a checkpoint (75) only if no node has failed.

    Args:
        codes: The exit code of each node; negative for a signal, as subprocess tells it.
    """
    codes = [128 - code if code < 0 else code for code in codes]
    failed = [code for code in codes if code not in (0, STOPPED)]
    return max(failed, default=max(codes))


class Ended:
    """How the commands of the nodes have ended, from files with their exit codes.

    Attributes:
        code: The exit code of the job so far: that of the first node that failed, since those that fail later do so
            because it has; else 75 if a node has stopped after a checkpoint; else 0.
    """

    def __init__(self, logs: Sequence[Path]) -> None:
        """Removes what an earlier job has left.

        Args:
            logs: The file with the output of each node; that with its exit code stands beside it.
        """
        self.code = 0
        self._failed_at: float | None = None
        self._pending = [path.with_suffix(".exit") for path in logs]
        for path in self._pending:
            path.unlink(missing_ok=True)

    @property
    def all(self) -> bool:
        """Whether all have ended."""
        return not self._pending

    def look(self) -> None:
        """Reads the files that have come since the last call, and removes them."""
        for path in [one for one in self._pending if one.exists() and one.read_text().endswith("\n")]:
            code = int(path.read_text())
            path.unlink()
            self._pending.remove(path)
            if self.code in (0, STOPPED):
                self.code = code or self.code
            if code not in (0, STOPPED) and self._failed_at is None:
                self._failed_at = time.monotonic()

    def seconds_since_failure(self) -> float:
        """Returns for how long nodes have gone on after one has failed; 0 if none has, or none goes on."""
        return time.monotonic() - self._failed_at if self._failed_at is not None and self._pending else 0.0
