"""Resuming a job of an engine: the command that starts the nodes reads the checkpoint, which only one of them has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.registry import find_backend
from engines.command import planned, run
from engines.interface import NodeJob
from launch.errors import UsageError
from launch.options import Options, option_words, read_options
from records.checkpoint import Checkpoint, CheckpointState, checkpoint_path, list_checkpoints, write_checkpoint
from tests.launching import lockstep, needs_namespaces, run_config

# Of a run on two nodes; where an option has a default, it is another one.
_RUN: dict[str, Any] = {
    "num_nodes": 2,
    "global_batch_size": 24,
    "micro_batch_size": 3,
    "batching": "padded",
    "momentum": 0.9,
    "warmup_ratio": 0.5,
    "logging_steps": 7,
    "metric_for_best_model": "accuracy",
    "early_stopping_patience": 3,
    "hang_timeout": 77.0,
    "backend_settings": {"bucket_cap_mb": 3, "embedding_gradients": None, "transport": None},
    "task_settings": {"hidden_size": 16, "dropout": 0.1},
}


def _saved(directory: Path, *, num_processes: int = 4, **options: Any) -> Path:
    """Saves a checkpoint as node 0 of a job in this directory does."""
    node = directory / "node0"
    node.mkdir(parents=True)
    state = CheckpointState(
        config=run_config("ddp", num_processes, node, **(_RUN | options)),
        data={},
        step=3,
        num_updates=3,
        evaluated_step=0,
        best=None,
        evaluations_since_best=0,
        evaluations=[],
        backend={},
        optimizer_groups=[],
        optimizer_scalars={},
    )
    path = checkpoint_path(node, 3)
    write_checkpoint(path, Checkpoint(state, {"model.weight": torch.zeros(2)}))
    return path


def _job(engine: str, *words: str | Path) -> NodeJob:
    return planned(["ddp", *f"--engine {engine}".split(), *map(str, words)])[0].job


def _script(engine: str, *words: str | Path) -> str:
    return planned(["ddp", "--engine", engine, *map(str, words)])[0].script()


def _options_of(job: NodeJob, node_rank: int) -> Options:
    """Reads the command line of a node as the node does."""
    words = job.words(node_rank, "127.0.0.1")[len(job.program) + 1 :]
    return read_options(job.backend, find_backend(job.backend).settings, words)


def test_options_are_written_as_people_write_them() -> None:
    values = {"bucket_cap_mb": 2.0, "dropout": 0.5, "max_steps": 20, "evaluate": False}
    assert option_words(values) == ["--bucket-cap-mb=2", "--dropout=0.5", "--max-steps=20", "--no-evaluate"]


def test_a_job_goes_on_with_the_options_of_its_run(tmp_path: Path) -> None:
    _saved(tmp_path)
    job = _job("netns", "--resume", "--output-dir", tmp_path)
    assert (job.num_nodes, job.num_processes) == (2, 4)
    assert (job.run.momentum, job.run.micro_batch_size, job.run.hang_timeout) == (0.9, 3, 77.0)
    first, second = (_options_of(job, node_rank) for node_rank in (0, 1))
    assert first.start is not None
    assert second.start is None
    of_a_node = {"node_rank", "output_dir"}
    for options in (second, job):
        assert options.run.model_dump(exclude=of_a_node) == first.run.model_dump(exclude=of_a_node)
    for options in (first, second):
        assert options.backend_settings.model_dump() == _RUN["backend_settings"]
        assert options.task_settings.model_dump().items() >= _RUN["task_settings"].items()


@pytest.mark.parametrize("engine", ["mpi --hosts 127.0.0.1,127.0.0.2", "slurm", "ray", "netns"])
def test_from_a_checkpoint_by_its_name(tmp_path: Path, engine: str) -> None:
    job = _job(engine, "--resume", _saved(tmp_path / "before"), "--output-dir", tmp_path / "run")
    assert (job.num_nodes, job.num_processes, job.run.threads_per_rank) == (2, 4, 1)
    assert {"--momentum=0.9", "--threads-per-rank=1", "--hidden-size=16"} <= {*job.options}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--eval-batch-size 8", {"eval_batch_size": 8}),
        # Each of these would contradict a default.
        ("--momentum 0.9", {"momentum": 0.9, "optimizer": "sgd"}),
        ("--early-stopping-patience 5", {"early_stopping_patience": 5, "metric_for_best_model": "accuracy"}),
        ("--micro-batch-size 6", {"micro_batch_size": 6, "num_processes": 4}),
        ("--num-nodes 3 --num-processes 3", {"micro_batch_size": None, "global_batch_size": 24, "num_nodes": 3}),
        ("--num-nodes 1", {"num_nodes": 1, "num_processes": 4}),
        # Other ranks add in another order in any case.
        ("--num-processes 2", {"num_processes": 2, "threads_per_rank": None}),
        ("--threads-per-rank 2", {"num_processes": 4, "threads_per_rank": 2}),
    ],
)
def test_what_the_user_gives_comes_first(tmp_path: Path, words: str, values: dict[str, Any]) -> None:
    _saved(tmp_path)
    job = _job("slurm", "--resume", "latest", *words.split(), "--output-dir", tmp_path)
    assert job.run.model_dump(include={*values}) == values
    given = [word.removeprefix("--") for word in words.split() if word.startswith("--")]
    assert not [word for word in job.options if word.startswith(tuple(f"--{name}=" for name in given))]


def test_a_file_of_options_comes_before_those_of_the_run(tmp_path: Path) -> None:
    _saved(tmp_path / "run")
    (tmp_path / "options.yaml").write_text("eval-batch-size: 8\n")
    job = _job("slurm", "--resume", "--config", tmp_path / "options.yaml", "--output-dir", tmp_path / "run")
    assert job.run.eval_batch_size == 8
    assert not [word for word in job.options if word.startswith("--eval-batch-size")]
    assert "--momentum=0.9" in job.options


@pytest.mark.parametrize("engine", ["slurm --cpus-per-task", "ray --cpus-per-node"])
def test_ranks_have_the_threads_of_the_run_where_there_are_cores_for_them(tmp_path: Path, engine: str) -> None:
    _saved(tmp_path, threads_per_rank=1000)
    resumed = ("--resume", "--output-dir", tmp_path)
    assert _job(engine.split()[0], *resumed).run.threads_per_rank == 1000
    assert _job(f"{engine} 2000", *resumed).run.threads_per_rank == 1000
    assert _job(f"{engine} 1999", *resumed).run.threads_per_rank is None
    # The cores are those of this machine, or of hosts that are taken to be like it.
    assert _job("netns", *resumed).run.threads_per_rank is None
    assert _job("mpi --hosts 127.0.0.1,127.0.0.2", *resumed).run.threads_per_rank is None


def test_a_job_of_slurm_asks_for_the_cores_of_the_run(tmp_path: Path) -> None:
    _saved(tmp_path, threads_per_rank=5)
    script = _script("slurm", "--resume", "--output-dir", tmp_path)
    assert "\n#SBATCH --nodes=2\n" in script
    assert "\n#SBATCH --cpus-per-task=10\n" in script
    assert "--threads-per-rank=5 " in script


def test_hosts_on_this_machine_have_the_threads_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.netns.num_cpus", lambda: 64)
    _saved(tmp_path / "run")
    script = _script("netns", "--resume", "--output-dir", tmp_path / "run")
    assert "--threads-per-rank=1 " in script
    assert "--threads-per-rank=16 " in _script("netns", "--num-processes", "4", "--output-dir", tmp_path / "new")
    assert "--threads-per-rank=16 " not in script


REFUSALS = {
    "another-value": (
        "slurm --resume --output-dir {run} --momentum 0.5",
        "--momentum 0.5: the run to resume has 0.9; leave it out, or start a new run",
    ),
    "another-task": (
        "netns --resume --output-dir {run} --task text-classification",
        "--task text-classification: the run to resume has token-tagging",
    ),
    "too-many-nodes": (
        "netns --resume --output-dir {run} --num-nodes 3",
        "--resume: the run had 4 ranks, which 3 nodes cannot share evenly; choose their number with --num-processes",
    ),
    "too-many-hosts": (
        "mpi --hosts a,b,c --resume {run}/node0",
        "--resume: the run had 4 ranks, which 3 nodes cannot share evenly",
    ),
    "batch": (
        "ray --resume --output-dir {run} --num-nodes 5 --num-processes 5",
        "--global-batch-size 24 is not a multiple of the 5 ranks",
    ),
    "part": ("slurm --resume --output-dir {run} --diagnose", "--diagnose measures whole runs"),
    "no-directory": ("slurm --resume", "--resume latest: --output-dir is missing"),
    "no-name": ("slurm --resume= --output-dir {run}", "--resume : this directory holds no checkpoint"),
    "no-run": ("slurm --resume {empty}", "this directory holds no checkpoint"),
    "of-all-nodes": ("slurm --resume {run}", "this directory holds no checkpoint"),
    "no-checkpoint": ("slurm --resume {text}", "is incomplete or not a safetensors file"),
    "damaged": ("slurm --resume --output-dir {damaged}", "can be used"),
    "code": (
        "slurm --resume --output-dir {own}",
        "--resume: the checkpoint names the task tests.faulty:SlowTask, whose code is not Lockstep's; if you trust it, "
        "add --task tests.faulty:SlowTask",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused_before_anything_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    words, message = REFUSALS[case]
    names = ("run", "own", "damaged", "empty", "text")
    places = {name: tmp_path / name for name in names}
    _saved(places["run"])
    _saved(places["own"], task="tests.faulty:SlowTask")
    _saved(places["damaged"]).write_bytes(b"nothing")
    places["empty"].mkdir()
    places["text"].write_text("nothing\n")
    monkeypatch.chdir(places["empty"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as refused:
        planned(["ddp", "--engine", *words.format(**places).split()])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_exit_code_of_what_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = lockstep("ddp", "--engine", "slurm", "--resume", "--momentum", "0.5", "--output-dir", tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr == "lockstep: --momentum 0.5: the run to resume has 0.9; leave it out, or start a new run\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_many_ranks_are_confirmed_where_they_would_be_on_this_machine(tmp_path: Path) -> None:
    _saved(tmp_path, num_processes=4096, num_nodes=16, global_batch_size=4096, micro_batch_size=1)
    resumed = ("--resume", "--output-dir", tmp_path)
    with pytest.raises(UsageError, match="the run had 4096 ranks, which is many for this machine; choose their number"):
        _job("netns", *resumed)
    assert _job("netns", *resumed, "--num-processes", "4096").num_processes == 4096
    assert _job("slurm", *resumed).num_processes == 4096


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("diverged", 3)])
def test_a_run_that_has_finished_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    """As on one node. A job of SLURM that starts again does so by the commands of its nodes, and not by this one."""
    _saved(tmp_path)
    monkeypatch.setattr("launch.resume._final_status", lambda directory: status)
    assert run(["ddp", "--engine", "slurm", "--resume", "latest", "--output-dir", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert shown.out.startswith(f"the run in {tmp_path / 'node0'} ")
    assert shown.out.endswith("there is nothing to resume\n")
    assert shown.err == ""


@pytest.mark.parametrize(
    "words",
    [
        "kubernetes --image X --resume --output-dir {run}",  # nodes would look in the volume
        "kubernetes --image X --resume {run}/node0 --output-dir {run}",
        "slurm --resume {run}/elsewhere.safetensors --output-dir {run}",
        "slurm --resume {long} --output-dir {run}",
        "slurm --resume --output-dir {run}/new",
        "slurm --output-dir {run}",
    ],
)
def test_what_only_the_nodes_can_read_is_left_to_them(tmp_path: Path, words: str) -> None:
    _saved(tmp_path)
    words = words.format(run=tmp_path, long="x" * 300)
    job = _job(words)
    assert (job.num_nodes, job.num_processes) == (2, 2)
    assert (job.run.optimizer, job.run.threads_per_rank) == ("adamw", None)
    assert not [word for word in job.options if word.startswith("--momentum")]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.launchers
def test_two_hosts_go_on_where_nothing_is_repeated(tmp_path: Path) -> None:
    directory, node = tmp_path / "run", tmp_path / "run" / "node0"
    options = ("--task", "token-tagging", "--hidden-size", "16", "--optimizer", "sgd", "--momentum", "0.9")
    options = (*options, "--max-steps", "10", "--save-every", "4", "--num-processes", "4", "--logging-steps", "1")
    done = lockstep("ddp", "--engine", "netns", *options, "--threads-per-rank", "1", "--output-dir", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads((node / "record.json").read_text())
    resume = ("ddp", "--engine", "netns", "--resume", "--output-dir", directory)
    done = lockstep(*resume)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the run in {node} is complete; there is nothing to resume\n"
    # As if it had been lost after its sixth step.
    (node / "record.json").unlink()
    for path in list_checkpoints(node)[:-1]:
        path.unlink()
    done = lockstep(*resume)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((node / "record.json").read_text())
    assert record["resumed_from"]["step"] == 4
    assert record["steps"] == whole["steps"]
    assert [rank["weights_sha256"] for rank in record["ranks"]] == [rank["weights_sha256"] for rank in whole["ranks"]]
