"""The processor's clock of one process: CPU seconds and, where the processor counts them, instructions.

Wall time says how long a step took. This clock says what it cost: the CPU seconds of all threads, in user mode and in
the kernel, and the instructions that they retired in user mode. A rank that spins while it waits pays for its waiting
here, so this clock never says which backend is faster.

Instructions come from Linux' perf_event_open(2). With ``inherit``, a counter includes the threads that its thread
starts, and with ``inherit_thread`` it leaves out child processes, as CPU seconds do. A reading is the sum over threads
that live and threads that have ended (``__perf_event_read_value`` in the kernel's kernel/events/core.c).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

# The number of the system call, for which the C library has no function (asm/unistd.h).
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}

# PERF_TYPE_HARDWARE and PERF_COUNT_HW_INSTRUCTIONS, from linux/perf_event.h like the other numbers.
_INSTRUCTIONS = (0, 1)

# The first version of struct perf_event_attr: type, size, config, sample_period, sample_type, read_format, flags.
_ATTRIBUTES = struct.Struct("=IIQQQQQ16x")
_TOTAL_TIMES = 1 << 0 | 1 << 1  # PERF_FORMAT_TOTAL_TIME_ENABLED and ..._RUNNING
_FLAGS = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 35  # inherit, exclude_kernel, exclude_hv, inherit_thread
_CLOSE_ON_EXEC = 1 << 3  # PERF_FLAG_FD_CLOEXEC

# What a counter returns: the count, and for how long it was enabled and running, in nanoseconds.
_COUNT = struct.Struct("=QQQ")

_PARANOIA = Path("/proc/sys/kernel/perf_event_paranoid")
_MOST_PARANOID = 2

_SHARED = (
    "instructions were counted only part of the time, because other programs use the processor's counters or its cores "
    "are of two kinds; end other profilers, or bind the ranks to cores of one kind"
)


class Reading(NamedTuple):
    """What this process has used: CPU seconds since it began, and instructions since its clock was opened."""

    cpu_seconds: float
    instructions: int | None

    def since(self, earlier: Reading) -> Reading:
        """Returns what was used between an earlier reading of the same clock and this one."""
        if self.instructions is None or earlier.instructions is None:
            return Reading(self.cpu_seconds - earlier.cpu_seconds, None)
        return Reading(self.cpu_seconds - earlier.cpu_seconds, self.instructions - earlier.instructions)


class ProcessorClock:
    """Reads CPU seconds and instructions of this process, over all its threads.

    Instructions count from the moment when the clock is opened. It should be opened before there are other threads:
    of those that live already, the instructions are counted, too, but a thread that one of them starts meanwhile may
    be missed.
    """

    def __init__(self) -> None:
        self._counters: list[int] = []
        self._reason: str | None = None
        try:
            number = _system_call()
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # the thread has ended meanwhile
                    self._counters.append(_open_counter(number, int(thread.name)))
        except OSError as error:
            self._give_up(_explain(error))

    def read(self) -> Reading:
        """Reads the clock.

        Returns:
            CPU seconds, user and system, and instructions in user mode. Instructions are None where they cannot be
            counted, and from then on once they were not counted all of the time. What perf_event_open(2) then
            offers, count * enabled / running, is an estimate, and this clock does not give it.
        """
        return Reading(time.process_time(), self._instructions())

    @property
    def why_no_instructions(self) -> str | None:
        """Why readings have no instructions, and what to do about it, in one sentence; None if they have."""
        return self._reason

    def close(self) -> None:
        """Stops counting instructions."""
        self._give_up("the clock has been closed")

    def _instructions(self) -> int | None:
        if self._reason is not None:
            return None
        readings = [_COUNT.unpack(os.read(counter, _COUNT.size)) for counter in self._counters]
        if any(running != enabled for _, enabled, running in readings):
            self._give_up(_SHARED)
            return None
        total: int = sum(count for count, _, _ in readings)
        return total

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        while self._counters:
            os.close(self._counters.pop())


def why_no_instructions() -> str | None:
    """Returns why instructions cannot be counted here, and what to do about it, in one sentence; None if they can."""
    with closing(ProcessorClock()) as clock:
        return clock.why_no_instructions


def _system_call() -> int:
    """Returns the number of perf_event_open.

    Raises:
        OSError: It is not known for this system.
    """
    number = _SYSTEM_CALLS.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return number


def _open_counter(system_call: int, thread: int) -> int:
    """Counts the instructions of a thread and of those that it starts; returns the descriptor to read from.

    Raises:
        OSError: They cannot be counted.
    """
    kind, event = _INSTRUCTIONS
    attributes = _ATTRIBUTES.pack(kind, _ATTRIBUTES.size, event, 0, 0, _TOTAL_TIMES, _FLAGS)
    any_cpu = no_group = -1
    # Without a prototype, ctypes would pass 32 bits, and the C library's function takes long integers.
    numbers = [ctypes.c_long(number) for number in (thread, any_cpu, no_group, _CLOSE_ON_EXEC)]
    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(system_call), attributes, *numbers)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _explain(error: OSError) -> str:
    """Says why no counter could be opened, and what to do: see the errors in perf_event_open(2)."""
    system = os.uname()
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return (
            "this machine shows no counter of instructions, like most virtual machines; use another, or have the host "
            "of the virtual machine turn on its performance counters (virtual PMU)"
        )
    if error.errno == errno.EACCES and (level := _paranoia()) > _MOST_PARANOID:
        return (
            f"kernel.perf_event_paranoid is {level}, but users may count only up to {_MOST_PARANOID}; have an "
            f"administrator run sysctl kernel.perf_event_paranoid={_MOST_PARANOID}"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            "the system call perf_event_open is forbidden here, as in most containers; give the container the "
            "capability PERFMON (docker run --cap-add PERFMON, from Docker 23 on)"
        )
    if error.errno == errno.EINVAL:
        return f"Linux {system.release} cannot count the threads of one process; use Linux 5.13 or later"
    if error.errno == errno.ENOSYS:
        return (
            "there is no system call perf_event_open that is known here "
            f"({system.sysname} {system.release}, {system.machine}); use Linux on {' or '.join(_SYSTEM_CALLS)}"
        )
    return f"no counter of instructions can be opened ({error.strerror}); see the errors in perf_event_open(2)"


def _paranoia() -> int:
    """Returns kernel.perf_event_paranoid, where 2 lets users count in user mode and Debian's 3 forbids that, too."""
    try:
        return int(_PARANOIA.read_text())
    except (OSError, ValueError):
        return 0
