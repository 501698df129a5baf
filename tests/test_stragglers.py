"""A rank is slow if it computes slower or reads slowly, not if other programs take its core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from records.record import RankRecord
from tests.launching import LOCKSTEP, ending, wait_until
from watch.heartbeat import Heartbeat
from watch.rank_files import RankFiles
from watch.stragglers import find_stragglers

pytestmark = pytest.mark.slow

PHASES = """
import sys, time
from watch.heartbeat import Heartbeat

heartbeat = Heartbeat()
for step in range(40):
    before, began = heartbeat.own_seconds, time.monotonic()
    heartbeat.enter("data", step)
    time.sleep(float(sys.argv[1]))
    heartbeat.enter("forward")
    computed_until = time.thread_time() + 0.02
    while time.thread_time() < computed_until:
        pass
    heartbeat.enter("backward")
    print(heartbeat.own_seconds - before, time.monotonic() - began)
"""


@contextmanager
def _robbers(core: int) -> Iterator[None]:
    """Two programs that take two thirds of a core."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("own", "step", "found"),
    [((0.01, 0.02), 0.05, [1]), ((0.01, 0.014), 0.05, []), ((0.001, 0.002), 0.05, []), ((0.0, 0.02), 0.05, [])],
)
def test_a_straggler_is_slow_and_costs_the_others_time(own: tuple[float, float], step: float, found: list[int]) -> None:
    ranks = [
        RankRecord.model_construct(rank=rank, hostname="a", own_seconds=[9, 9, *[seconds] * 5], step_seconds=[step] * 7)
        for rank, seconds in enumerate(own)
    ]
    assert [straggler.rank for straggler in find_stragglers(ranks)] == found


def test_a_phase_in_which_others_may_delay_a_rank_is_not_its_own() -> None:
    """As the forward pass with --sync-batchnorm, in which ranks wait for each other."""
    heartbeat = Heartbeat()
    heartbeat.own_phases = ("data",)
    for phase in ("forward", "backward"):
        heartbeat.enter(phase, 1)
        time.sleep(0.01)
    heartbeat.enter("update", 1)
    assert heartbeat.own_seconds == 0.0


def test_time_in_the_queue_is_not_a_ranks_own() -> None:
    """What it computes and what it waits for storage is."""
    core = min(os.sched_getaffinity(0))
    medians = []
    with _robbers(core):
        for slept in ("0", "0.03"):
            done = subprocess.run(
                ["taskset", "--cpu-list", str(core), sys.executable, "-c", PHASES, slept],
                cwd=PROJECT_DIRECTORY,
                capture_output=True,
                text=True,
                check=True,
            )
            steps = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
            medians.append([median(column) for column in zip(*steps, strict=True)])
    (own, wall), (own_with_sleep, _) = medians
    assert wall > 0.03
    assert 0.01 < own < 0.7 * wall
    assert 0.015 < own_with_sleep - own < 0.06


def test_a_rank_that_is_robbed_of_its_core_is_no_straggler(tmp_path: Path) -> None:
    run, cores = tmp_path / "run", sorted(os.sched_getaffinity(0))
    options = ["--task", "token-tagging", "--num-train-samples", "4096", "--global-batch-size", "2048"]
    options += ["--max-steps", "60", "--save-every", "never", "--output-dir", str(run)]
    job = subprocess.Popen([str(LOCKSTEP), "ddp", *options], stdout=subprocess.DEVNULL)
    with _robbers(cores[-1]), ending(job):
        for rank in (0, 1):
            pid = wait_until(RankFiles(run, rank).running_pid, f"rank {rank}", job=job)
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[-1] if rank else cores[0]})
        assert job.wait(timeout=200) == 0
    record = json.loads((run / "record.json").read_text())
    assert record["stragglers"] == []
