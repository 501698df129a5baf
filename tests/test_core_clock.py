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


@pytest.mark.slow
@needs_taskset
def test_two_processes_that_share_a_core_take_twice_as_long() -> None:
    # Other programs on this core may slow one process down more than two, but hardly three times in a row.
    seen: list[float] = []
    while len(seen) < 3 and not (seen and 1.4 < seen[-1] < 3):
        seen.append(_measure(2))
    assert 1.4 < seen[-1] < 3, seen


@pytest.mark.slow
@needs_taskset
def test_processes_compute_at_the_same_time_beside_another_program() -> None:
    """One has half of the core, four have a fifth each, or less; of those that begin late, the last would be alone."""
    program = subprocess.Popen(_on_one_core("-c", "while True: pass"), start_new_session=True)
    try:
        assert _measure(4) > 2
    finally:
        program.kill()
        program.wait()


def test_one_core_is_the_measure_and_cores_that_are_not_there_are_not_measured() -> None:
    assert core_clock.measure_apart(1) == 1.0
    assert core_clock.measure_apart(1_000_000) is None
