"""The processor's clock: it counts what all threads of a process do, or says why it cannot.

The kernel counts its own task clock (nanoseconds on a processor) in the way in which it counts instructions: one number
chooses which. With it, the counting is tested where the processor has no counter to offer.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from launch import doctor
from launch.starters.interface import PROJECT_DIRECTORY
from records.record import RankRecord, read_record
from tests.clock_costs import TASK_CLOCK
from tests.launching import run_config
from training import clock
from training.clock import ProcessorClock, Reading, why_no_instructions
from training.measurements import Measurements
from watch.heartbeat import Heartbeat

# A container's default: seccomp(2) refuses the one system call. Offset 0 of what the filter sees is the call's number.
_FORBID = """
import ctypes, struct
from training.clock import _system_call
code = [(0x20, 0, 0, 0), (0x15, 0, 1, _system_call()), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *line) for line in code)
pointer = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
c = ctypes.CDLL(None)
assert c.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert c.prctl(22, 2, struct.pack("HxxxxxxQ", len(code), pointer), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""

_RANK = "\nimport sys\nfrom training.rank import main\nmain(sys.argv[1])"

_TORCH = """
from training.clock import ProcessorClock
early = ProcessorClock()
import torch

def work(times):
    for _ in range(times):
        torch.mm(matrix, matrix)

torch.set_num_threads(2)
matrix = torch.ones(400, 400)
work(3)
late = ProcessorClock()
began = early.read(), late.read()
work(40)
for clock, before in zip((early, late), began):
    used = clock.read().since(before)
    print(used.cpu_seconds, used.instructions)
"""


def _python(code: str, *arguments: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _in_a_thread(seconds: float) -> None:
    thread = threading.Thread(target=_burn, args=(seconds,))
    thread.start()
    thread.join()


@pytest.fixture
def task_clock(monkeypatch: pytest.MonkeyPatch) -> str:
    """Counts nanoseconds on a processor as if they were instructions; returns what makes another program do so."""
    monkeypatch.setattr(clock, "_INSTRUCTIONS", TASK_CLOCK)
    if (reason := why_no_instructions()) is not None:
        release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
        assert release < [5, 13] or not reason.startswith("Linux"), reason
        pytest.skip(reason)
    return f"from training import clock\nclock._INSTRUCTIONS = {TASK_CLOCK}\n"


def test_cpu_seconds_grow_with_work_in_any_thread() -> None:
    one = ProcessorClock()
    before = one.read()
    _burn(0.05)
    _in_a_thread(0.05)
    assert one.read().since(before).cpu_seconds >= 0.1


def test_threads_are_counted_and_child_processes_are_not(task_clock: str) -> None:
    """Threads that lived when the clock was opened, that were started later, and that have ended."""
    go, done, end = threading.Event(), threading.Event(), threading.Event()

    def wait_and_burn() -> None:
        go.wait()
        _burn(0.1)
        done.set()
        end.wait()

    older = threading.Thread(target=wait_and_burn)
    older.start()
    one = ProcessorClock()
    try:
        readings = [one.read()]
        go.set()
        done.wait()
        readings.append(one.read())
        _in_a_thread(0.1)
        readings.append(one.read())
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
        readings.append(one.read())
    finally:
        go.set()
        end.set()
        older.join()
    used = [later.since(before).instructions or 0 for before, later in pairwise(readings)]
    assert used[0] > 0.09e9
    assert used[1] > 0.09e9
    assert used[2] < 0.25e9
    one.close()
    assert one.read().instructions is None


@pytest.mark.slow
def test_threads_of_torch_are_counted_whether_they_are_there_or_not(task_clock: str) -> None:
    for line in _python(task_clock + _TORCH).splitlines():
        cpu_seconds, nanoseconds = map(float, line.split())
        # The system may book interrupts and what the hypervisor takes on one of them and not on the other.
        assert nanoseconds / 1e9 == pytest.approx(cpu_seconds, rel=0.25)


def test_twice_the_work_is_twice_the_instructions() -> None:
    if (reason := why_no_instructions()) is not None:
        pytest.skip(reason)

    def instructions(rounds: int) -> int:
        before = one.read()
        for _ in range(rounds):
            pass
        used = one.read().since(before).instructions
        assert used is not None
        return used

    one = ProcessorClock()
    instructions(1000)
    assert instructions(4_000_000) / instructions(2_000_000) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOENT, ("this machine shows no counter of instructions", "virtual PMU")),
        (errno.EACCES, ("kernel.perf_event_paranoid is 4", "sysctl kernel.perf_event_paranoid=2")),
        (errno.EPERM, ("perf_event_open is forbidden", "--cap-add PERFMON")),
        (errno.EINVAL, ("cannot count the threads of one process", "Linux 5.13 or later")),
        (errno.EMFILE, ("no counter of instructions can be opened (Too many open files)", "perf_event_open(2)")),
    ],
)
def test_each_refusal_has_its_sentence(
    number: int, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(system_call: int, thread: int) -> int:
        raise OSError(number, os.strerror(number))

    (tmp_path / "paranoid").write_text("4\n")
    monkeypatch.setattr(clock, "_PARANOIA", tmp_path / "paranoid")
    monkeypatch.setattr(clock, "_open_counter", refuse)
    reason = why_no_instructions() or ""
    assert all(part in reason for part in words)
    assert len(reason.splitlines()) == 1
    reading = ProcessorClock().read()
    assert reading.instructions is None
    assert reading.cpu_seconds > 0


def test_another_processor_has_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_SYSTEM_CALLS", {"abacus": 1})
    assert (why_no_instructions() or "").endswith("use Linux on abacus")


def test_a_counter_that_was_shared_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate never passes for a count, not even once the counter runs all of the time again."""
    reader, writer = os.pipe()

    def of_this_thread(system_call: int, thread: int) -> int:
        if thread != threading.get_native_id():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return reader

    monkeypatch.setattr(clock, "_open_counter", of_this_thread)
    one = ProcessorClock()
    with os.fdopen(writer, "wb", buffering=0) as counter:
        for numbers in ((70, 100, 100), (90, 130, 120), (110, 150, 140)):
            counter.write(struct.pack("=QQQ", *numbers))
        assert one.read().instructions == 70
        assert one.why_no_instructions is None
        assert one.read().instructions is None
        assert "only part of the time" in (one.why_no_instructions or "")
        assert one.read().instructions is None


def test_doctor_says_in_one_line_whether_instructions_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for reason, words in ((None, "the processor counts them in every step of a run"), ("for a reason", "for a reason")):
        monkeypatch.setattr(doctor, "why_no_instructions", lambda reason=reason: reason)
        doctor.run([])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("instructions:")]
        assert lines == [f"instructions: {words}"]


class _Readings(ProcessorClock):
    """A clock that was read before."""

    def __init__(self, *readings: Reading) -> None:
        super().__init__()
        self._readings = list(readings)

    def read(self) -> Reading:
        return self._readings.pop(0)


@pytest.mark.parametrize(("last", "instructions"), [(50, [4, 16]), (None, None)])
def test_a_step_has_what_was_used_since_the_step_before(last: int | None, instructions: list[int] | None) -> None:
    readings = Reading(0.5, 7), Reading(1.0, 30), Reading(1.25, 34), Reading(2.0, last)
    measurements = Measurements(Heartbeat(), _Readings(*readings))
    measurements.on_epoch_begin()
    measurements.on_step_end(1)
    measurements.on_step_end(2)
    assert measurements.cpu_seconds == [0.25, 0.75]
    assert measurements.instructions == instructions


# Of a step that takes some milliseconds, a hypervisor may steal a quarter; of so many, it does not.
_STEPS = 60


def _train(tmp_path: Path, prelude: str) -> RankRecord:
    """Runs the program of a rank in a new process, after some other code."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    config = run_config("single", 1, run, max_steps=_STEPS, micro_batch_size=8)
    (run / "run.json").write_text(config.model_dump_json())
    _python(prelude + _RANK, run)
    (rank,) = read_record(run / "record.json").ranks
    assert len(rank.step_cpu_seconds) == _STEPS
    assert 0 < sum(rank.step_cpu_seconds) < rank.cpu_seconds
    return rank


@pytest.mark.slow
def test_a_rank_records_what_is_counted(tmp_path: Path, task_clock: str) -> None:
    rank = _train(tmp_path, task_clock)
    assert rank.step_instructions is not None
    assert sum(rank.step_instructions) / 1e9 == pytest.approx(sum(rank.step_cpu_seconds), rel=0.25)


@pytest.mark.slow
def test_a_rank_in_a_container_that_forbids_counting_records_none(tmp_path: Path) -> None:
    assert "perf_event_open is forbidden" in _python(
        _FORBID + "from training.clock import why_no_instructions\nprint(why_no_instructions())"
    )
    assert _train(tmp_path, _FORBID).step_instructions is None
