"""Nodes that leave a job and return to it: the others go on, and what is trained stays what it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from launch.unfinished import record_end
from records.checkpoint import list_checkpoints
from records.news import LossesRead, Resumed
from records.progress import ProgressLog
from records.record import Resumption, StepRecord, World, read_record
from tests.forked.client import ForkedJob
from tests.launching import (
    ending,
    free_port,
    lockstep,
    require_backend,
    require_module,
    run_config,
    start_lockstep,
    starting,
    train,
    trains,
    wait_until,
)
from tests.resuming import assert_equal_to_rounding
from tests.sparing import in_ci
from training.plan import Plan
from watch.failures import kind_of
from watch.rank_files import RankFiles, started_ranks

OPTIONS = ("--max-steps", "14", "--save-every", "1", "--threads-per-rank", "1")


def _kill(node: subprocess.Popen[str] | ForkedJob, place: Path) -> None:
    """Kills the launcher of a node, whose guardian kills its starter, and its rank."""
    ranks = [pid for rank in started_ranks(place) if (pid := rank.running_pid())]
    node.kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):  # the guardian may have been faster
            os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.mark.slow
@pytest.mark.launchers
# The launcher of accelerate is the agent of torchrun, too.
@pytest.mark.parametrize("backend", in_ci(["ddp", "horovod"], ["ddp", "accelerate", "horovod"]))
def test_a_node_leaves_and_returns(tmp_path: Path, backend: str) -> None:
    """Kills all of one node, lets the other go on alone, and starts the node again with the command it had."""
    require_backend(backend)
    with starting("forked"):
        train("single", tmp_path / "undisturbed", *OPTIONS, "--task", "token-tagging")
    where = ("--num-nodes", "2", "--min-nodes", "1", "--master-addr", "127.0.0.1", "--master-port", free_port())
    options = (*OPTIONS, "--task", "tests.faulty:CompanyTask", "--num-processes", "2", "--max-restarts", "3")
    options = (*options, "--hang-timeout", "0", "--resume")  # alone, a rank waits for the other on purpose

    def start(node_rank: int) -> subprocess.Popen[str] | ForkedJob:
        place = tmp_path / f"node{node_rank}"
        return start_lockstep(backend, *options, *where, "--node-rank", str(node_rank), "--output-dir", place)

    with ending(start(0)) as first, ending(start(1)) as second:
        wait_until(lambda: trains(tmp_path / "node1"), "a rank of the second node in training")
        _kill(second, tmp_path / "node1")
        news = tmp_path / "node0" / "progress.jsonl"
        wait_until(lambda: _has_saved_alone(news), "a checkpoint of the first node alone")
        with ending(start(1)) as again:
            outputs = [job.communicate(timeout=300) for job in (first, again)]
    assert [first.returncode, again.returncode] == [0, 0], outputs
    (path,) = tmp_path.glob("node*/record.json")
    record = json.loads(path.read_text())
    # Where the second node takes long to come, the first one begins alone.
    assert [world["num_processes"] for world in record["worlds"]][-3:] == [2, 1, 2]
    assert [step["step"] for step in record["steps"]] == [*range(1, 15)]
    assert len(record["ranks"]) == record["config"]["num_processes"] == 2
    assert_equal_to_rounding(path.parent, tmp_path / "undisturbed", rel=1e-11)
    assert all(list_checkpoints(tmp_path / f"node{number}") for number in (0, 1))


def _has_saved_alone(news: Path) -> bool:
    """Whether a run has gone on with one rank after two, and has saved a step since."""
    worlds: list[int] = []
    for line in news.read_text().splitlines() if news.exists() else []:
        event = json.loads(line)
        if event["event"] == "resumed":
            worlds = [world["num_processes"] for world in event["worlds"]]
        elif event["event"] == "saved" and worlds[-2:] == [2, 1]:
            return True
    return False


_NODES = "--num-nodes 2 --master-addr 127.0.0.1"
REFUSALS = {
    "more-than-there-are": (f"ddp {_NODES} --min-nodes 3 --max-restarts 1", "--min-nodes 3", "at most --num-nodes 2"),
    "none": (f"ddp {_NODES} --min-nodes 0 --max-restarts 1", "--min-nodes 0", "greater than or equal to 1"),
    "one-node": ("ddp --min-nodes 1 --max-restarts 1", "--min-nodes 1", "has no effect on one node"),
    "no-restart": (f"ddp {_NODES} --min-nodes 1", "--min-nodes 1", "--max-restarts"),
    "no-checkpoint": (
        f"ddp {_NODES} --min-nodes 1 --max-restarts 1 --save-every never",
        "--min-nodes 1",
        "--save-every never",
    ),
    "one-process": (
        f"single {_NODES} --min-nodes 1 --max-restarts 1",
        "single cannot run on several nodes",
        "another backend",
    ),
    "method": (f"ddp {_NODES} --min-nodes 1 --max-restarts 1 --start-method fork", "--start-method fork", "torchrun"),
    "method-of-fixed-nodes": (
        f"accelerate {_NODES} --min-nodes 1 --max-restarts 1 --start-method accelerate",
        "--start-method accelerate",
        "on nodes that may leave started by torchrun",
    ),
    "method-of-other-nodes": (
        f"horovod {_NODES} --min-nodes 1 --max-restarts 1 --start-method horovod-node",
        "--start-method horovod-node",
        "on nodes that may leave started by horovod-torchrun",
    ),
    "nodes-that-stay": (f"horovod {_NODES} --start-method horovod-torchrun", "horovod-torchrun", "add --min-nodes"),
    "one-node-of-horovod": ("horovod --start-method horovod-torchrun", "horovod-torchrun", "add --min-nodes"),
    "batch-norm": (
        f"ddp {_NODES} --min-nodes 1 --max-restarts 1 --sync-batchnorm",
        "--sync-batchnorm",
        "leave out one of the two",
    ),
    "compression": (
        f"ddp {_NODES} --min-nodes 1 --max-restarts 1 --grad-compression fp16",
        "--grad-compression",
        "--min-nodes",
    ),
    "batch": (
        f"ddp {_NODES} --min-nodes 1 --max-restarts 1 --global-batch-size 1",
        "--global-batch-size 1",
        "choose a multiple of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    require_backend(arguments.split()[0])
    done = lockstep(*arguments.split(), "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_step_that_was_computed_again_is_in_the_record_once(tmp_path: Path) -> None:
    """Rank 0 of an unfinished run has told of some steps twice, since its ranks have started again."""
    log = ProgressLog(tmp_path, rank=0)
    log.write(LossesRead(steps=[_step(number) for number in (1, 2, 3)]))
    origin = Resumption(checkpoint="", step=2, backend="ddp", num_processes=2)
    worlds = [World(first_step=1, num_processes=2), World(first_step=3, num_processes=1)]
    log.write(Resumed(origin=origin, steps=[_step(1), _step(2)], evaluations=[], worlds=worlds))
    log.write(LossesRead(steps=[_step(3), _step(4)]))
    log.write(LossesRead(steps=[_step(4), _step(5)]))  # started again without a checkpoint
    record_end(run_config("ddp", 2, tmp_path, micro_batch_size=4), "failed", "why")
    record = read_record(tmp_path / "record.json")
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5]
    assert record.worlds == worlds


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_curves_have_each_step_once(tmp_path: Path, has_checkpoint: bool) -> None:
    """TensorBoard hides the steps that ranks had taken and take again, since they have started again."""
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator")
    origin = Resumption(checkpoint="", step=2, backend="ddp", num_processes=2)
    again = [_step(number).model_copy(update={"loss": 2.0}) for number in range(3 if has_checkpoint else 1, 6)]
    log = ProgressLog(tmp_path, rank=0, tracker="tensorboard")
    log.write(LossesRead(steps=[_step(number) for number in (1, 2, 3, 4)]))
    log = ProgressLog(tmp_path, rank=0, tracker="tensorboard")
    if has_checkpoint:
        log.write(Resumed(origin=origin, steps=[_step(1), _step(2)], evaluations=[], worlds=[]))
    log.write(LossesRead(steps=again))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    assert [event.value for event in events] == [1.0 if has_checkpoint else 2.0] * 2 + [2.0] * 3


def test_what_an_earlier_process_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    rank = RankFiles(tmp_path, 0)
    rank.report_error(ValueError("of the process before"))
    rank.report_success()
    code = "import pathlib, sys; from watch.rank_files import *; RankFiles(pathlib.Path(sys.argv[1]), 0).announce()"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=PROJECT_DIRECTORY)
    assert rank.started()
    assert rank.failure() is None
    assert not rank.succeeded()


def test_a_rank_reports_its_error_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    announced = (
        "import pathlib, sys; from watch.rank_files import *; from watch import rank_files as module\n"
        "files = RankFiles(pathlib.Path(sys.argv[1]), 0); files.announce()\n"
        "def full(path, text): raise OSError(28, 'No space left on device')\n"
        "module.write_atomically = full\n"
        "files.report_error(FloatingPointError('the loss is not finite' + 9000 * '\u2603'))"
    )
    subprocess.run([sys.executable, "-c", announced, tmp_path], check=True, cwd=PROJECT_DIRECTORY)
    failure = RankFiles(tmp_path, 0).failure()
    assert failure is not None
    assert failure.message.startswith("FloatingPointError: the loss is not finite")
    assert failure.kind is kind_of(FloatingPointError())


def test_ranks_of_a_smaller_world_cut_the_same_batches() -> None:
    """Four ranks, one of which leaves: the global batch is no multiple of the three that stay."""
    sizes = {"num_samples": 100, "global_batch_size": 32, "micro_batch_size": 8, "seed": 1}
    plans = [Plan(**sizes, world_size=number) for number in (4, 3, 1)]
    for batches in zip(*(plan.epoch(2) for plan in plans), strict=True):
        assert len({tuple(batch) for batch in batches}) == 1
        for plan in plans:
            cut = [one for rank in range(plan.world_size) for one in plan.micro_batches(batches[0], rank)]
            assert sorted(id_ for one in cut if one.weight for id_ in one.sample_ids) == sorted(batches[0])
            assert max(len(one.sample_ids) for one in cut) <= 8


def _step(number: int) -> StepRecord:
    return StepRecord(step=number, epoch=0, num_samples=4, loss=1.0, grad_norm=1.0, learning_rate=0.1, skipped=False)


@pytest.mark.slow
def test_ranks_that_come_after_the_end_train_nothing(tmp_path: Path) -> None:
    """A node that comes while rank 0 saves the model has all ranks start again once it is saved."""
    run = tmp_path / "run"
    train("ddp", run, *OPTIONS, "--task", "token-tagging", "--num-processes", "1")
    (run / "logs" / "rank0.done").unlink()
    config = json.loads((run / "run.json").read_text()) | {"num_nodes": 2, "min_nodes": 1, "max_restarts": 1}
    (run / "run.json").write_text(json.dumps(config))
    before = {path: path.stat().st_mtime_ns for path in (run / "record.json", run / "model.safetensors")}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "training.rank", str(run), "LOCAL_RANK"]
    subprocess.run(command, check=True, cwd=PROJECT_DIRECTORY, env={**os.environ, **place, **ranks})
    assert (run / "logs" / "rank0.done").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before
