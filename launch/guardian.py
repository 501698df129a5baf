"""Ends what a process has started once that process has ended, even by SIGKILL.

Whatever is started under `guarded` carries a mark in its environment, and so does what it starts in turn: ranks,
their starter, workers that load data. A guardian, one small process beside them, waits for the end of a pipe whose
other end only the guarded process holds. When the system closes that end, the guardian kills everything that carries
the mark, and removes the temporary files of the guarded process. Only Linux shows the environment of a process
(proc_pid_environ(5)), and only a process that clears its own on purpose is out of reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_MARK_VARIABLE = "LOCKSTEP_JOB"
# A process that is replacing its program shows no environment for a moment: it is looked for again.
_SECONDS_OF_PEACE = 1.0
# A process that is blocked in a driver or on a dead network disk cannot be killed.
_MOST_SECONDS = 30.0
_SECONDS_BETWEEN_LOOKS = 0.05


@contextlib.contextmanager
def guarded(scratch: str | None = None) -> Iterator[dict[str, str]]:
    """Yields the environment variables for processes that must not outlive this block or this process.

    Args:
        scratch: A directory that must not outlive this process; it is left alone at the end of the block.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    ours, theirs = os.pipe()  # closed in whatever this process executes
    # The guardian keeps neither the terminal nor any file of the user open, and ignores signals meant for the job.
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, *([scratch] if scratch is not None else [])],
        env={name: value for name, value in os.environ.items() if name != _MARK_VARIABLE},
        cwd="/",
        stdin=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours)
    try:
        yield {_MARK_VARIABLE: mark}
    finally:
        _sweep(mark, seconds_of_peace=0.0)
        guardian.kill()
        guardian.wait()
        os.close(theirs)


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """Yields a new directory for temporary files, which is removed even if this process ends by SIGKILL."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name, guarded(name):
        yield Path(name)


def _sweep(mark: str, *, seconds_of_peace: float) -> None:
    """Kills every process that carries the mark, until none has been found for `seconds_of_peace`."""
    started_at = found_at = time.monotonic()
    while True:
        now = time.monotonic()
        if _kill_marked(mark):
            found_at = now
        elif now - found_at >= seconds_of_peace:
            return
        if now - started_at > _MOST_SECONDS:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _kill_marked(mark: str) -> bool:
    entry = f"{_MARK_VARIABLE}={mark}".encode()
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found = True
    return found


def _guard(mark: str, *scratch: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    _sweep(mark, seconds_of_peace=_SECONDS_OF_PEACE)
    for directory in scratch:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(*sys.argv[1:])
