"""Signals that ask a command to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user or the system asked the job to end; like KeyboardInterrupt, it passes by `except Exception`."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@contextlib.contextmanager
def signals_raised(
    on_first: Callable[[signal.Signals], None] | None = None, *, repeatedly: bool = False
) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into Interrupted, so that cleanup ends what was started.

    Args:
        on_first: Is called for the first signal, which then does not raise.
        repeatedly: Whether every signal raises, because a library that is being loaded may swallow the first one.
            Otherwise signals after the one that raised are ignored.
    """
    is_first = on_first is not None

    def stop(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if is_first and on_first is not None:
            is_first = False
            on_first(signal.Signals(signal_number))
            return
        for number in () if repeatedly else before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not stop us from ending the ranks
        raise Interrupted(signal_number)

    # Under nohup(1), the end of a session does not end the run.
    numbers = [one for one in _INTERRUPTS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
