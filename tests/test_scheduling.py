"""How ranks are scheduled: as batch jobs, where that pays, and bound to cores, in a run that asks for it and in a race.

A race binds ranks unless it is told otherwise.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from backends.registry import find_backend
from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions
from compare.race.placement import variables_of
from launch.errors import UsageError
from launch.options import read_options
from launch.resolve import resolve, settle
from launch.starters.interface import PROJECT_DIRECTORY
from records.config import NETWORK_VARIABLE
from records.environment import num_cpus, num_ranks_here
from records.record import read_record
from tests.launching import LOCKSTEP, lockstep, require_backend, wait_for_steps
from tests.sparing import in_ci
from training.scheduling import policy_in_force, schedule_as_batch


@pytest.mark.launchers
@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["ddp"], ["ddp", "horovod"]))
def test_each_rank_has_a_core_of_its_own(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--max-steps", "20", "--bind-ranks", "--threads-per-rank", "1")
    job = subprocess.Popen(
        [str(LOCKSTEP), backend, *options, "--num-processes", "2", "--output-dir", str(run)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for_steps(run)
        ranks = [int((run / "logs" / f"rank{rank}.pid").read_text().split()[0]) for rank in range(2)]
        bound = [psutil.Process(pid).cpu_affinity() for pid in ranks]
        policies = {os.sched_getscheduler(thread.id) for pid in ranks for thread in psutil.Process(pid).threads()}
    finally:
        assert job.wait() == 0
    assert bound == [[core] for core in sorted(os.sched_getaffinity(0))[:2]]
    assert policies == {os.SCHED_BATCH}
    assert {rank.scheduling for rank in read_record(run / "record.json").ranks} == {"batch"}
    # What the record says of the machine is not what is left to rank 0.
    assert read_record(run / "record.json").environment.num_cpus == num_cpus()


def test_ranks_that_need_more_cores_than_there_are_cannot_be_bound(tmp_path: Path) -> None:
    threads = str(num_cpus())
    asked = ("ddp", "--num-processes", "2", "--threads-per-rank", threads, "--bind-ranks", "--device", "cpu")
    done = lockstep(*asked, cwd=tmp_path)
    assert done.returncode == 2
    expected = (
        f"lockstep: --bind-ranks: 2 ranks with {threads} thread(s) each need {2 * num_cpus()} cores, and this machine"
    )
    assert done.stderr.startswith(expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ddp",), "batch"),
        (("ddp", "--num-processes", "4"), "batch"),
        (("horovod",), "batch"),
        (("horovod", "--start-method", "mpirun"), "normal"),
        (("horovod", "--num-processes", "4"), "normal"),
        (("horovod", "--num-processes", "4", "--wait", "sleep"), "batch"),
        (("horovod", "--start-method", "mpirun", "--scheduling", "batch"), "batch"),
        (("ddp", "--scheduling", "normal"), "normal"),
    ],
)
def test_a_rank_that_polls_may_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    """Where there are more ranks than cores, and where Open MPI polls, too."""
    monkeypatch.setattr("launch.scheduling.num_cpus", lambda: 2)
    backend, *options = arguments
    row = find_backend(backend)
    common = ("--num-processes", "2", "--device", "cpu", "--task", "token-tagging")
    asked = read_options(backend, row.settings, [*common, *options])
    config, _, _ = settle(backend, row, asked, started_at=0.0, noted=[])
    assert config.scheduling == expected


@pytest.mark.parametrize("policy", ["chosen", "forbidden"])
def test_what_the_user_or_a_sandbox_has_decided_stays(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_policy(*_: object) -> None:
        if policy == "forbidden":
            raise PermissionError
        raise AssertionError("another policy was set")

    monkeypatch.setattr(os, "sched_setscheduler", set_policy)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_IDLE if policy == "chosen" else os.SCHED_OTHER)
    schedule_as_batch()
    assert policy_in_force() == ("other" if policy == "chosen" else "normal")


def test_a_system_without_the_policy_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "SCHED_BATCH")
    schedule_as_batch()
    asked = read_options(
        "ddp", find_backend("ddp").settings, ["--scheduling=batch", "--device=cpu", "--task=token-tagging"]
    )
    with pytest.raises(UsageError, match="--scheduling batch: this system has no such policy"):
        resolve("ddp", find_backend("ddp"), asked, started_at=0.0)


def test_nodes_in_namespaces_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NETWORK_VARIABLE, raising=False)
    assert num_ranks_here(8, 4) == 2
    monkeypatch.setenv(NETWORK_VARIABLE, "1gbit")
    assert num_ranks_here(8, 4) == 8


@pytest.mark.parametrize(
    ("placement", "own", "bound"),
    [
        (True, [], True),
        (False, [], False),
        (True, ["--no-bind-ranks"], False),
        (True, [f"--threads-per-rank={num_cpus()}"], False),
    ],
)
def test_a_race_binds_ranks_where_each_can_have_a_core(placement: bool, own: list[str], bound: bool) -> None:
    options = RaceOptions(backends=["ddp"], num_processes=[2], placement=placement)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu", *own], None))
    assert ("--bind-ranks" in plan.run_options) == bound


@pytest.mark.parametrize("placement", [True, False])
def test_a_race_offers_huge_pages_and_leaves_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, placement: bool
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    options = RaceOptions(backends=["ddp"], num_processes=[2], placement=placement, entrant=["own=ddp:NCCL_DEBUG=WARN"])
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    seen = [variables_of(plan, run) for run in plan.runs()]
    assert {"NCCL_DEBUG"} <= set().union(*seen)
    assert all("GLIBC_TUNABLES" not in one and ("THP_MEM_ALLOC_ENABLE" in one) == placement for one in seen)


def test_a_race_without_diagnosis_has_timed_runs_alone() -> None:
    options = RaceOptions(backends=["ddp"], num_processes=[2], diagnosis=False)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    assert {run.purpose for run in plan.runs()} == {"timed"}
