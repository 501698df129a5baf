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

from compare.collectives.measurement import read_collectives
from records.checkpoint import checkpoint_step, list_checkpoints
from tests.launching import (
    OF_EACH_STARTER,
    ending,
    lockstep,
    processes_of,
    processes_with,
    require_backend,
    start_lockstep,
    starting,
    train,
    wait_until,
)
from tests.slurm_cluster import CLUSTER, STATE, on_slurm, slurm
from tests.sparing import in_ci

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_NODES = ("--engine", "slurm", "--num-nodes", "2", "--time", "10")


def _state(number: str) -> str:
    """The state of a job in the queue, and its nodes."""
    return slurm("squeue", "--noheader", "--format=%T on %N", "--jobs", number)


def _number_of_job(run: Path) -> str:
    """The number of the only job in the queue whose output goes there."""

    def find() -> str | None:
        listed = [line.split() for line in slurm("squeue", "--noheader", "--Format=JobID:20,STDOUT:900").splitlines()]
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
    return not left and not [*run.glob("job*.pid"), *run.glob("job*.exit"), *run.glob("job*.code")]


def _next_checkpoint(run: Path, *, after: int = 0) -> int:
    """The newest step after this one that has a checkpoint on some node."""

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
    slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
    try:
        yield
    finally:
        # A node that is down is back in service as soon as its daemon has registered (ReturnToService=2).
        subprocess.run([CLUSTER, "node", name], check=True)
        wait_until(lambda: "down" not in slurm("sinfo", "--noheader", "--nodes", name, "--format=%T"), f"node {name}")


@contextlib.contextmanager
def _full_cluster() -> Iterator[None]:
    script = "#!/bin/sh\nsleep 600"
    submit = ["sbatch", "--parsable", "--nodes=3", "--exclusive", "--time=15", "--output=/dev/null"]
    number = subprocess.run(submit, input=script, check=True, capture_output=True, text=True).stdout.strip()
    try:
        wait_until(lambda: "RUNNING" in _state(number), "a full cluster")
        yield
    finally:
        slurm("scancel", number)


@on_slurm
@pytest.mark.parametrize("backend", OF_EACH_STARTER)
def test_two_nodes_of_two_ranks_compute_what_one_does(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_backend(backend)
    # What Horovod puts into one buffer, and with it the order in which four ranks are added, depends on timing.
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    four_ranks = ("--num-processes", "4", *OPTIONS)
    run = tmp_path / "a run $HOME"  # which nothing may read as two words or as a variable
    with starting("launchers"):
        alone = train(backend, tmp_path / "alone", *four_ranks)
        done = lockstep(backend, *TWO_NODES, "--partition", "main", *four_ranks, "--output-dir", run)
    assert done.returncode == 0, done.stdout + done.stderr + (run / "job.log").read_text()
    _assert_same(_record(run), alone)
    assert f"its script is {run / 'job.sh'}" in done.stdout
    assert "the model and the record are in " in done.stdout
    assert _is_gone(run)
    again = lockstep(backend, *TWO_NODES, *OPTIONS, "--output-dir", run)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


@on_slurm
@pytest.mark.parametrize("backend", in_ci(["ddp"], OF_EACH_STARTER))
def test_a_job_survives_its_rank_its_time_limit_and_its_node(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    options = (*OPTIONS, "--max-steps", "16", "--batching", "padded")
    with starting("forked"):
        alone = train(backend, tmp_path / "alone", *options, "--num-processes", "2")
    run, go_on = tmp_path / "run", tmp_path / "go-on"
    options = (*options, "--save-every", "1", "--max-restarts", "1", "--logging-steps", "1")
    held = ("--task", "tests.faulty:HeldTask", "--until", go_on)
    with ending(start_lockstep(backend, *TWO_NODES, *options, *held, "--output-dir", run)) as job:
        number = _number_of_job(run)
        _next_checkpoint(run)
        pid = next(run.glob("node1/logs/rank*.pid"))
        os.kill(int(pid.read_text().split()[0]), signal.SIGKILL)
        # Node 0 saves no more before it has started again, which takes its ranks seconds.
        wait_until((run / "node0" / "attempts" / "1").exists, "a restart of node 0")
        _next_checkpoint(run, after=_next_checkpoint(run))
        slurm("scancel", "--signal=USR1", "--batch", number)  # what SLURM does before the time limit
        wait_until((run / "node0" / "logs" / "stop").exists, "a request to stop")
        go_on.touch()
        wait_until(lambda: "PENDING" in _state(number), "a requeue")
        go_on.unlink()
        _next_checkpoint(run, after=_next_checkpoint(run))
        with _lost_node("node2"):
            wait_until(lambda: "RUNNING on node[1,3]" in _state(number), "a new node")
            go_on.touch()
            output, errors = job.communicate(timeout=300)
    assert job.returncode == 0, output + errors + (run / "job.log").read_text()
    _assert_same(_record(run), alone)
    assert "restart 1 of 1, from step " in errors
    assert errors.count(f"job {number} is back in the queue and will continue from its newest checkpoint") == 2, errors
    assert _is_gone(run)


@on_slurm
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = lockstep("ddp", *TWO_NODES, *OPTIONS, "--task", "tests.faulty:DyingTask", "--output-dir", run)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"lockstep: (node 1: )?ddp failed: rank 1 ", done.stderr), done.stderr
    assert "failed with exit code 1 (srun: error: " in done.stderr
    assert _is_gone(run)


@on_slurm
def test_a_job_that_is_told_to_stop_saves_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--seconds", "0.1", "--logging-steps", "1", "--max-steps", "5000")
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, *options, "--output-dir", run)) as job:
        number = _number_of_job(run)
        wait_until(lambda: [*run.glob("node*/progress.jsonl")], "a step")
        job.send_signal(signal.SIGTERM)
        output, errors = job.communicate(timeout=300)
    assert job.returncode == 75, output + errors + (run / "job.log").read_text()
    assert re.search(r"stopped after step \d+; continue with --resume", errors), errors
    assert _next_checkpoint(run)
    assert "JobState=FAILED" in slurm("scontrol", "show", "job", "--oneliner", number)  # and not requeued
    assert _is_gone(run)


@on_slurm
def test_a_job_waits_for_nodes_and_for_slurm(tmp_path: Path) -> None:
    with _full_cluster():
        with ending(_started("ddp", *TWO_NODES, *OPTIONS, "--output-dir", tmp_path / "run")) as job:
            number = _number_of_job(tmp_path / "run")
            assert f"lockstep: job {number} waits (Resources)" in _line(job)
            with _no_controller():
                refused = lockstep("ddp", *TWO_NODES, *OPTIONS, "--output-dir", tmp_path / "another")
                assert "lockstep: SLURM does not answer (" in _line(job)
            slurm("scancel", number)
            _, errors = job.communicate(timeout=60)
        assert job.returncode == 1
        assert errors == f"lockstep: job {number} was cancelled\n"
        assert refused.returncode == 2
        assert "--engine slurm: SLURM does not answer (" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        assert not (tmp_path / "another").exists()

        with ending(_started("ddp", *TWO_NODES, *OPTIONS, "--output-dir", tmp_path / "third")) as job:
            number = _number_of_job(tmp_path / "third")
            _line(job)
            job.send_signal(signal.SIGTERM)
            _, errors = job.communicate(timeout=60)
        assert job.returncode == 143, errors
        assert "JobState=CANCELLED" in slurm("scontrol", "show", "job", "--oneliner", number)


@on_slurm
def test_a_running_job_that_is_cancelled_by_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--seconds", "0.1", "--logging-steps", "1", "--max-steps", "5000")
    with ending(_started("ddp", *TWO_NODES, *OPTIONS, *options, "--output-dir", run)) as job:
        number = _number_of_job(run)
        wait_until(lambda: [*run.glob("node*/progress.jsonl")], "a step", job=job)
        slurm("scancel", number)
        _, errors = job.communicate(timeout=90)
    assert job.returncode not in (0, 75), errors
    assert f"lockstep: job {number} was cancelled; continue with --resume latest" in errors.splitlines(), errors
    wait_until(lambda: _is_gone(run), "the end of all ranks")


@contextlib.contextmanager
def _held_sbatch(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A job whose sbatch has been called, and goes on when there is a file `go` in the directory."""
    slow = directory / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(
        f"#!/bin/sh\ntouch {directory}/asked\nuntil [ -e {directory}/go ]; do sleep 0.1; done\n"
        f'exec {shutil.which("sbatch")} "$@"\n'
    )
    slow.chmod(0o755)
    env = {"PATH": f"{slow.parent}:{os.environ['PATH']}"}
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, "--output-dir", directory / "run", env=env)) as job:
        wait_until((directory / "asked").exists, "sbatch", job=job)
        yield job


@on_slurm
def test_a_signal_that_comes_before_the_job_has_a_number(tmp_path: Path) -> None:
    with _held_sbatch(tmp_path) as job:
        job.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        output, errors = job.communicate(timeout=60)
    assert job.returncode == 143, errors
    number = re.search(r"job (\d+) is in the queue", output)
    assert number is not None
    assert "JobState=CANCELLED" in slurm("scontrol", "show", "job", "--oneliner", number[1])


@on_slurm
def test_a_second_signal_does_not_wait_for_sbatch(tmp_path: Path) -> None:
    with _held_sbatch(tmp_path) as job:
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGTERM)  # another one, since two of a kind may arrive as one
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 143, errors
    assert f"STDOUT:200 lists it with the output {tmp_path / 'run' / 'job.log'}; end it with scancel" in errors


def _started(*arguments: str | Path) -> subprocess.Popen[str]:
    job = start_lockstep(*arguments)
    assert isinstance(job, subprocess.Popen)
    return job


def _line(job: subprocess.Popen[str]) -> str:
    assert job.stderr is not None
    return job.stderr.readline()


@contextlib.contextmanager
def _no_controller() -> Iterator[None]:
    daemon = psutil.Process(int((STATE / "slurmctld.pid").read_text()))
    daemon.terminate()
    daemon.wait(timeout=30)
    try:
        yield
    finally:
        subprocess.run([CLUSTER, "controller"], check=True)


# What sbatch refuses, or nobody can carry out.
REFUSALS_OF_SLURM = {
    "partition": ("--partition gpu", "--partition gpu", "invalid partition specified: gpu"),
    "gpus": ("--gpus-per-node 4 --global-batch-size 64", "--gpus-per-node 4", "change it, or leave it out"),
    "memory": ("--mem 900G", "--mem 900G", "Memory specification can not be satisfied"),
    "further": ("--sbatch-option constraint=a100", "Invalid feature specification", "change what it asks for"),
    "unknown": ("--sbatch-option partytion=x", "unrecognized option", "partytion"),
}


@on_slurm
@pytest.mark.parametrize("case", REFUSALS_OF_SLURM)
def test_slurm_refuses(tmp_path: Path, case: str) -> None:
    options, *words = REFUSALS_OF_SLURM[case]
    _assert_refused(tmp_path / "run", options, words)
    assert slurm("squeue", "--noheader") == ""


@on_slurm
@pytest.mark.exhaustive
def test_collectives_are_measured_on_its_nodes(tmp_path: Path) -> None:
    require_backend("horovod")
    output = tmp_path / "out.json"
    options = ("--backends", "ddp,horovod", "--operations", "all_reduce", "--sizes", "1KB,16KB,256KB")
    done = lockstep("allreduce", *TWO_NODES, *options, "--seconds-per-point", "0.01", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "ddp, 2 x cpu: given to slurm; " in done.stdout
    content = read_collectives(output)
    assert content.network == "slurm"
    assert [(one.backend, one.num_processes, len(one.points)) for one in content.series] == [
        *(("ddp", 2, 3), ("horovod", 2, 3))
    ]
    # The machine that is described is that of rank 0, whose variables those of the job are.
    assert content.environment.variables["GLOO_SOCKET_IFNAME"]
    assert list(tmp_path.iterdir()) == [output]


REFUSALS = {
    "no-time": ("--time soon", "--time soon", "12:00:00"),
    "two-minutes": ("--time 2", "--time 2: is too short", "4 minutes"),
    "seconds": ("--time 0:90", "--time 0:90", "4 minutes"),
    "days": ("--time 1-2-3", "--time 1-2-3", "2-12:00:00"),
    "memory": ("--mem much", "--mem much", "16G"),
    "no-gpu": ("--gpus-per-node 0", "--gpus-per-node 0", "greater than"),
    "two-words": ("--account a\tb", "--account", "give one word"),
    "dashes": ("--sbatch-option=--exclusive", "--exclusive", "without dashes"),
    "own": ("--sbatch-option nodes=3", "nodes=3", "use --num-nodes"),
    "another-cluster": ("--sbatch-option clusters=b", "clusters=b", "set the variable SLURM_CLUSTERS"),
    "of-ours": ("--sbatch-option partition=gpu", "partition=gpu", "use --partition"),
    "waiting": ("--sbatch-option wait", "'wait' is set by Lockstep", "waits for the job"),
    "node-rank": ("--node-rank 1", "--node-rank", "leave the option out"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    options, *words = REFUSALS[case]
    _assert_refused(tmp_path / "run", options, words)


def test_a_machine_without_slurm_is_refused(tmp_path: Path) -> None:
    _assert_refused(tmp_path / "run", "", ["there is no SLURM on this machine", "--dry-run"], env={"PATH": "/nowhere"})


def _assert_refused(run: Path, options: str, words: list[str], env: dict[str, str] | None = None) -> None:
    arguments = ("ddp", "--engine", "slurm", "--num-nodes", "2", *options.split(" "), "--output-dir", run)
    done = lockstep(*filter(None, arguments), env=env or {})
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not run.exists()


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    options = "--num-nodes 4 --gpus-per-node 2 --partition gpu --time 1-0 --cpus-per-task 8"
    further = ("--sbatch-option", "constraint=a100|h100", "--sbatch-option", "exclusive", "--no-requeue")
    done = lockstep(
        "ddp", "--engine", "slurm", *options.split(), *further, "--dry-run", "--output-dir", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    for line in ("nodes=4", "gpus-per-node=2", "time=1-0", "constraint='a100|h100'", "exclusive", "no-requeue"):
        assert f"\n#SBATCH --{line}\n" in done.stdout
    assert "--threads-per-rank=4 --num-processes=8 --num-nodes=4" in done.stdout
    assert f"\n# before sbatch: mkdir -p {tmp_path / 'run'}\n" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    assert not (tmp_path / "run").exists()
