"""Jobs of SLURM, on a real cluster whose nodes are all this machine (tests/slurm/cluster.sh)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from records.checkpoint import checkpoint_step, list_checkpoints
from tests.launching import (
    OF_EACH_STARTER,
    PROJECT_DIRECTORY,
    ending,
    lockstep,
    processes_of,
    processes_with,
    require_backend,
    start_lockstep,
    train,
    wait_until,
)

pytestmark = pytest.mark.slurm

CLUSTER = PROJECT_DIRECTORY / "tests" / "slurm" / "cluster.sh"
STATE = Path("/run/lockstep-slurm")
OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_NODES = ("--engine", "slurm", "--num-nodes", "2", "--time", "10")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster with three idle nodes; without SLURM these tests are skipped, with REQUIRE_SLURM=1 they fail."""
    reason = None
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        reason = "SLURM is not installed (slurm-wlm and munge)"
    elif os.getuid() != 0:
        reason = "only root can start the daemons of a cluster"
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    was_running = (STATE / "slurmctld.pid").exists()
    subprocess.run([CLUSTER, "start"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(STATE / "slurm.conf"))
        yield
    if not was_running:
        subprocess.run([CLUSTER, "stop"], check=True)


def _slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _number_of_job(run: Path) -> str:
    """The number of the only job in the queue whose output goes there."""

    def find() -> str | None:
        listed = [line.split() for line in _slurm("squeue", "--noheader", "--Format=JobID:20,STDOUT:900").splitlines()]
        return next((number for number, output in listed if output == str(run / "job.log")), None)

    return wait_until(find, "the job in the queue")


def _record(run: Path) -> dict[str, object]:
    (path,) = run.glob("node*/record.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _assert_same(together: dict[str, object], alone: dict[str, object]) -> None:
    of_ranks = [[rank["weights_sha256"] for rank in record["ranks"]] for record in (together, alone)]  # type: ignore[attr-defined]
    assert of_ranks[0] == of_ranks[1]
    losses = [[step["loss"] for step in record["steps"]] for record in (together, alone)]  # type: ignore[attr-defined]
    assert losses[0] == losses[1]


def _is_gone(run: Path) -> bool:
    """Whether no process of the nodes is left, and no file that is only for a running job."""
    left = [one for node in (0, 1) for one in processes_of(run / f"node{node}")]
    return not left and not [*run.glob("node*.pid"), *run.glob("node*.exit")]


def _next_checkpoint(run: Path, *, after: int = 0) -> int:
    """The number of the first step after this one that has a checkpoint on some node."""

    def find() -> int:
        steps = [checkpoint_step(path) for node in run.glob("node[01]") for path in list_checkpoints(node)]
        return max((step for step in steps if step > after), default=0)

    return wait_until(find, f"a checkpoint after step {after}")


@contextlib.contextmanager
def _lost_node(name: str) -> Iterator[None]:
    """Ends all that runs on a node, as a loss of power would, and lets SLURM notice."""
    os.kill(int((STATE / f"slurmd.{name}.pid").read_text()), signal.SIGKILL)
    processes = [psutil.Process(pid) for pid in processes_with(f"SLURMD_NODENAME={name}")]
    # First what would tell SLURM of the end of the others.
    daemons = {one.parent() for one in processes if "slurmstepd" in getattr(one.parent(), "cmdline", list)()[0:1]}
    for process in [*daemons, *processes]:
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    _slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
    try:
        yield
    finally:
        subprocess.run([CLUSTER, "node", name], check=True)
        _slurm("scontrol", "update", f"nodename={name}", "state=resume")


@contextlib.contextmanager
def _full_cluster() -> Iterator[None]:
    script = "#!/bin/sh\nsleep 600"
    submit = ["sbatch", "--parsable", "--nodes=3", "--exclusive", "--time=15", "--output=/dev/null"]
    number = subprocess.run(submit, input=script, check=True, capture_output=True, text=True).stdout.strip()
    try:
        wait_until(lambda: "RUNNING" in _slurm("squeue", "--noheader", "--format=%T", "--jobs", number), "a full cluster")
        yield
    finally:
        _slurm("scancel", number)


@pytest.mark.parametrize("backend", OF_EACH_STARTER)
def test_two_nodes_compute_what_one_does(tmp_path: Path, cluster: None, backend: str) -> None:
    require_backend(backend)
    alone = train(backend, tmp_path / "alone", *OPTIONS, "--num-processes", "2")
    run = tmp_path / "a run $HOME"  # which nothing may read as two words or as a variable
    done = lockstep(backend, *TWO_NODES, "--partition", "main", *OPTIONS, "--output-dir", run)
    assert done.returncode == 0, done.stdout + done.stderr + (run / "job.log").read_text()
    _assert_same(_record(run), alone)
    assert f"its script is {run / 'job.sh'}" in done.stdout
    assert "the model and the record are in " in done.stdout
    assert _is_gone(run)
    again = lockstep(backend, *TWO_NODES, *OPTIONS, "--output-dir", run)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


def test_a_job_survives_its_rank_its_time_limit_and_its_node(tmp_path: Path, cluster: None) -> None:
    alone = train("ddp", tmp_path / "alone", *OPTIONS, "--max-steps", "16", "--num-processes", "2", "--batching", "padded")
    run, go_on = tmp_path / "run", tmp_path / "go-on"
    options = ("--task", "tests.faulty:HeldTask", "--until", go_on, "--max-steps", "16", "--threads-per-rank", "1")
    options = (*options, "--batching", "padded", "--save-every", "1", "--max-restarts", "1", "--logging-steps", "1")
    with ending(start_lockstep("ddp", *TWO_NODES, *options, "--output-dir", run)) as job:
        number = _number_of_job(run)
        held_at = _next_checkpoint(run)
        pid = next(run.glob("node1/logs/rank*.pid"))
        os.kill(int(pid.read_text().split()[0]), signal.SIGKILL)
        held_at = _next_checkpoint(run, after=held_at)
        _slurm("scancel", "--signal=USR1", "--batch", number)  # what SLURM does before the time limit
        wait_until((run / "node0" / "logs" / "stop").exists, "a request to stop")
        go_on.touch()
        wait_until(lambda: "PENDING" in _slurm("squeue", "--noheader", "--format=%T", "--jobs", number), "a requeue")
        go_on.unlink()
        _next_checkpoint(run, after=held_at + 1)
        with _lost_node("node2"):
            wait_until(lambda: "RUNNING node[1,3]" in _slurm("squeue", "--noheader", "--format=%T %N", "--jobs", number), "a new node")
            go_on.touch()
            output, errors = job.communicate(timeout=300)
    assert job.returncode == 0, output + errors + (run / "job.log").read_text()
    _assert_same(_record(run), alone)
    assert "restart 1 of 1, from step " in errors
    assert errors.count(f"job {number} is back in the queue and will continue from its newest checkpoint") == 2, errors
    assert _is_gone(run)
