"""Shows what the commands of the nodes print, and makes one exit code of theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_MARK = "lockstep: "
_STOPPED = 75


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
        """Prints the whole lines that have come since the last call."""
        for node_rank, path in enumerate(self._logs):
            for line in self._new_lines(node_rank, path):
                if line.startswith(_MARK):
                    place = f"node {node_rank}: " if node_rank else ""
                    print(f"{_MARK}{place}{line.removeprefix(_MARK)}", file=sys.stderr, flush=True)
                elif node_rank == 0:
                    print(line, flush=True)

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
    """Returns the exit code of a job from those of its nodes' commands.

    A node that others have waited for in vain fails with 1, as they do; a code that says more comes first. A job has
    stopped after a checkpoint (75) only if no node has failed.

    Args:
        codes: The exit code of each node; negative for a signal, as subprocess tells it.
    """
    codes = [128 - code if code < 0 else code for code in codes]
    failed = [code for code in codes if code not in (0, _STOPPED)]
    return max(failed, default=max(codes))
