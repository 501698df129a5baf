"""The Python stacks of ranks, taken from outside, whatever they are stuck in."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from backends.capabilities import Signs
from watch.rank_files import STACKS_SIGNAL, RankFiles

# Where many ranks share few cores, some of them wait for a core first.
_SECONDS_TO_WRITE = 10.0

# In the autograd starter, a rank computes or waits in a hook.
_IN_BACKWARD = re.compile(r"/(?:site|dist)-packages/torch/autograd/")


def take_stacks(ranks: Iterable[RankFiles]) -> dict[int, str]:
    """Makes these ranks write their stacks and returns the texts by rank; empty for one that does not answer.

    A rank answers from C, in a signal handler, even from inside a collective. A rank that is
    stopped is continued for that and stopped again.
    """
    asked = [(rank, pid, rank.state() == "T", _size(rank.stacks)) for rank in ranks if (pid := rank.running_pid())]
    for _, pid, was_stopped, _ in asked:
        _send(pid, STACKS_SIGNAL)
        if was_stopped:
            _send(pid, signal.SIGCONT)
    deadline = time.monotonic() + _SECONDS_TO_WRITE
    waiting = asked
    while waiting and time.monotonic() < deadline:
        time.sleep(0.005)
        for rank, pid, was_stopped, size in waiting:
            if was_stopped and _size(rank.stacks) > size:
                _send(pid, signal.SIGSTOP)
        waiting = [facts for facts in waiting if _size(facts[0].stacks) == facts[3]]
    time.sleep(0.1)  # the first bytes are there, the last may not be
    return {rank.rank: _since(rank.stacks, size) for rank, _, _, size in asked}


def innermost_frame(text: str) -> str:
    """Names the innermost frame that belongs neither to Python nor to an installed library."""
    frames = _main_frames(text)
    own = [frame for frame in frames if "/lib/python" not in frame[0] and not frame[0].startswith("<")]
    if not (own or frames):
        return "its stack could not be read"
    path, line, function = (own or frames)[0]
    return f"was at {Path(path).name}:{line} in {function}"


def waits_for_others(text: str, signs: Signs) -> bool:
    """Returns whether the main thread's innermost frame is one in which the library waits for other ranks."""
    frames = _main_frames(text)
    path = frames[0][0] if frames else ""
    _, is_library, place = path.rpartition("-packages/")  # of site-packages, or Debian's dist-packages
    return any(
        path.endswith(f"/{sign}") if sign.endswith(".py") else bool(is_library) and place.startswith(f"{sign}/")
        for sign in signs.waiting
    )


def is_in_backward(text: str) -> bool:
    """Returns whether the main thread's innermost Python frame is in the autograd starter."""
    frames = _main_frames(text)
    return bool(frames) and bool(_IN_BACKWARD.search(frames[0][0]))


def reports_an_error(text: str) -> bool:
    """Returns whether the main thread is on its way from an error to the end of its process."""
    frames = _main_frames(text)
    return any(path.endswith("/watch/rank_files.py") and name == "_report_and_exit" for path, _, name in frames)


def _main_frames(text: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame of the thread that got the signal, the innermost first."""
    main_thread = text.rpartition("Current thread")[2] or text
    return [(path, line, name) for path, line, name in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main_thread)]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _since(path: Path, size: int) -> str:
    return path.read_bytes()[size:].decode(errors="replace") if path.exists() else ""
