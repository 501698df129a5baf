"""Signals that ask a command to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user, or the system, asked the job to end; like KeyboardInterrupt, no handler of errors may take it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@contextlib.contextmanager
def signals_raised(
    on_first: Callable[[signal.Signals], None] | None = None, *, repeatedly: bool = False
) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into Interrupted, so that what was started is ended on the way out.

    With `on_first`, the first of them only calls it. With `repeatedly`, each raises, for where a library
    that is being loaded may swallow the first; otherwise those after the raised one are ignored.
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

    # Under nohup(1), the end of a session is no reason to end.
    numbers = [one for one in _INTERRUPTS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
