"""How much busy cores slow each other down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from compare.race import core_clock
from launch.starters.interface import PROJECT_DIRECTORY

needs_taskset = pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset has processes share a core")


def _on_one_core(*program: str) -> list[str]:
    return ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable, *program]


def _measure(num_processes: int) -> float:
    command = _on_one_core("-m", "compare.race.core_clock", str(num_processes))
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_DIRECTORY, check=True)
    return float(done.stdout)


def _measured_within(low: float, high: float, num_processes: int) -> list[float]:
    """Measures up to three times: other programs may disturb one of them, but hardly all."""
    seen: list[float] = []
    while len(seen) < 3 and not (seen and low < seen[-1] < high):
        seen.append(_measure(num_processes))
    return seen


@pytest.mark.slow
@needs_taskset
def test_two_processes_that_share_a_core_take_twice_as_long() -> None:
    seen = _measured_within(1.4, 3, num_processes=2)
    assert 1.4 < seen[-1] < 3, seen


@pytest.mark.slow
@needs_taskset
def test_processes_compute_at_the_same_time_beside_another_program() -> None:
    """One process has half of the core. Each of four has a fifth, or an eighth where each session has a half.

    If they began one after another, each would compute nearly alone, and the ratio would be near 1.
    """
    busy = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    program = subprocess.Popen(_on_one_core("-c", busy), start_new_session=True)  # as another user's would be
    try:
        seen = _measured_within(2, 6, num_processes=4)
    finally:
        program.kill()
        program.wait()
    assert 2 < seen[-1] < 6, seen


def test_one_core_is_the_measure_and_cores_that_are_not_there_are_not_measured() -> None:
    assert core_clock.measure_apart(1) == 1.0
    assert core_clock.measure_apart(1_000_000) is None
