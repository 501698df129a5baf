"""A run that stops anywhere and goes on, under whatever backend, goes the way of the unbroken one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.registry import find_backend
from launch.errors import UsageError
from launch.resume import Start, check_same_trajectory, inherited_options
from records.checkpoint import CheckpointState, checkpoint_path
from records.config import RunOptions
from tasks.token_tagging import TokenTaggingSettings
from tests.launching import (
    DISTRIBUTED,
    lockstep,
    require_backend,
    run_config,
    start_lockstep,
    train,
    wait_for_steps,
)
from tests.resuming import RUN, UnbrokenRuns, assert_equal_to_rounding, assert_same_run, weights
from tests.sparing import in_ci

NUM_STEPS = 6  # of RUN
EXACT = ("--dtype", "float32", "--dropout", "0.1", "--num-processes", "2", "--micro-batch-size", "8")
SAME_BITS = {
    "fp32": EXACT,
    "bf16": (*EXACT, "--precision", "bf16"),
    # So large a scale overflows at first: some of the steps are skipped.
    "fp16": (*EXACT, "--precision", "fp16", "--init-loss-scale", "262144"),
}
STOP_POINTS = [("ddp", "fp16"), ("horovod", "fp16"), ("accelerate", "bf16"), ("single", "fp16")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    return UnbrokenRuns(tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "precision"), STOP_POINTS, ids=lambda value: value)
def test_every_stop_point(tmp_path: Path, unbroken: UnbrokenRuns, backend: str, precision: str) -> None:
    options = [o for o in SAME_BITS[precision] if backend != "single" or o not in ("--num-processes", "2")]
    whole = unbroken(backend, *options)
    steps = json.loads((whole / "record.json").read_text())["steps"]
    assert any(step["skipped"] for step in steps) == (precision == "fp16")
    assert not all(step["skipped"] for step in steps)
    for step in range(1, NUM_STEPS):
        run = tmp_path / str(step)
        record = train(backend, run, "--resume", checkpoint_path(whole, step))
        assert record["resumed_from"]["step"] == step
        assert all(len(rank["step_seconds"]) == NUM_STEPS - step for rank in record["ranks"])
        assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "accelerate", "horovod"])
def test_four_ranks(tmp_path: Path, unbroken: UnbrokenRuns, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the order of a sum matters, and with it how a library lays out what it reduces."""
    require_backend(backend)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")  # or timing decides which gradients Horovod adds together
    whole = unbroken(backend, *EXACT[:4], "--num-processes", "4")
    for step in (1, 4):
        train(backend, tmp_path / str(step), "--resume", checkpoint_path(whole, step))
        assert_same_run(tmp_path / str(step), whole)


@pytest.mark.parametrize("saved_by", DISTRIBUTED)
@pytest.mark.parametrize("resumed_by", DISTRIBUTED)
def test_from_any_backend_to_any(tmp_path: Path, unbroken: UnbrokenRuns, saved_by: str, resumed_by: str) -> None:
    """In float32, at two ranks, in the middle of the second epoch: the same bits, unless one computes parts."""
    whole = unbroken(saved_by, *EXACT)
    record = train(resumed_by, tmp_path / "run", "--resume", checkpoint_path(whole, 3))
    assert record["config"]["backend"] == resumed_by
    assert record["resumed_from"]["backend"] == saved_by
    shards = {find_backend(name).capabilities.shards_weights for name in (saved_by, resumed_by)}
    if len(shards) == 1:
        assert_same_run(tmp_path / "run", whole)
    else:
        assert_equal_to_rounding(tmp_path / "run", whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", ("--num-processes", "2", "--micro-batch-size", "4")),
        ("ddp", ("--num-processes", "4")),
        ("ddp", ("--num-processes", "1")),
        ("horovod", ("--num-processes", "4", "--micro-batch-size", "4")),
        ("accelerate", ("--num-processes", "1", "--micro-batch-size", "8")),
        ("fsdp2", ("--num-processes", "4")),
        ("single", ("--num-processes", "1")),
        ("single", ("--num-processes", "1", "--micro-batch-size", "8")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[1::2]),
)
def test_in_another_world_or_split(
    tmp_path: Path, unbroken: UnbrokenRuns, backend: str, options: tuple[str, ...]
) -> None:
    """To the rounding of float64: the same samples enter the same steps."""
    require_backend(backend)
    whole = unbroken("ddp", "--num-processes", "2")
    record = train(backend, tmp_path / "run", "--resume", checkpoint_path(whole, 3), *options)
    assert record["resumed_from"] | {"checkpoint": ""} == {
        "checkpoint": "",
        "step": 3,
        "backend": "ddp",
        "num_processes": 2,
    }
    theirs = json.loads((whole / "record.json").read_text())
    for one, other in zip(record["steps"], theirs["steps"], strict=True):
        assert one["num_samples"] == other["num_samples"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, weights(whole)[name], rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["ddp", "horovod"], DISTRIBUTED))
def test_bert(tmp_path: Path, backend: str) -> None:
    """The real model, with dropout and accumulation."""
    require_backend(backend)
    options = ("--model", "bert-tiny", "--max-seq-length", "32", "--dropout", "0.1", "--max-steps", "6")
    options = (*options, "--num-processes", "2", "--micro-batch-size", "8", "--save-every", "2")
    train(backend, tmp_path / "whole", *options)
    start = checkpoint_path(tmp_path / "whole", 4)
    train(backend, tmp_path / "run", "--resume", start)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_what_is_kept_unless_it_is_given_again(tmp_path: Path) -> None:
    before = run_config("ddp", 2, tmp_path, micro_batch_size=4, evaluate=False, logging_steps=3, timeout=20.0)
    kept = inherited_options(before, "horovod", {"num_processes": "2"})
    assert (kept["evaluate"], kept["logging_steps"]) == (False, 3)
    assert "timeout" not in kept  # it belongs to one start on one machine


@pytest.mark.parametrize(
    ("batching", "backend", "given", "is_kept"),
    [
        ("packed", "ddp", {}, True),
        ("packed", "dp", {}, False),
        ("sorted", "dp", {}, True),
        ("padded", "ddp", {"sync_batchnorm": True}, True),
        ("sorted", "ddp", {"sync_batchnorm": True}, False),
    ],
)
def test_batches_that_a_run_cannot_have_are_not_kept(
    tmp_path: Path, batching: str, backend: str, given: dict[str, Any], is_kept: bool
) -> None:
    before = run_config("single", 1, tmp_path, micro_batch_size=4, batching=batching)
    assert inherited_options(before, backend, given).get("batching") == (batching if is_kept else None)


@pytest.mark.slow
def test_threads_are_kept(tmp_path: Path) -> None:
    """The order of sums depends on them."""
    run = tmp_path / "run"
    options = ("--task", "token-tagging", "--dtype", "float32", "--max-steps", "4", "--save-every", "2")
    train("single", run, *options, "--threads-per-rank", "1")
    start = checkpoint_path(run, 2)
    assert train("single", tmp_path / "kept", "--resume", start)["ranks"][0]["num_threads"] == 1
    done = lockstep("single", "--resume", start, "--threads-per-rank", "2", "--output-dir", tmp_path / "other")
    assert done.returncode == 0
    assert "--threads-per-rank is 2 and was 1: results are equal up to rounding, not bit for bit" in done.stdout


@pytest.fixture
def interrupted(tmp_path: Path, unbroken: UnbrokenRuns) -> Path:
    """A run that was lost after its fifth step, whose checkpoint was not on the disk yet."""
    run = tmp_path / "run"
    shutil.copytree(unbroken("ddp", *EXACT), run)
    (run / "record.json").unlink()
    checkpoint_path(run, 5).unlink()
    return run


def test_a_damaged_latest_falls_back(tmp_path: Path, interrupted: Path, unbroken: UnbrokenRuns) -> None:
    newest = checkpoint_path(interrupted, 4)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    done = lockstep("ddp", "--resume", "latest", "--output-dir", interrupted)
    assert done.returncode == 0, done.stderr
    assert f"skipped an unusable checkpoint: {newest}: is damaged: its content does not match its hash" in done.stdout
    assert "resuming after step 3" in done.stdout
    assert_same_run(interrupted, unbroken("ddp", *EXACT))
    assert (interrupted / "attempts" / "1" / newest.name).exists()
    # By its own name, it is refused.
    damaged = interrupted / "attempts" / "1" / newest.name
    done = lockstep("ddp", "--resume", damaged, "--output-dir", tmp_path / "other")
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockstep: --resume {damaged}: is damaged")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logs/rank0.pid", "logs/rankx.pid", "attempts/1-old/record.json"])
def test_odd_things_in_a_directory_are_no_matter(tmp_path: Path, interrupted: Path, name: str) -> None:
    path = interrupted / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    done = lockstep("ddp", "--resume", "--output-dir", interrupted)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_resumed(tmp_path: Path, interrupted: Path, unbroken: UnbrokenRuns) -> None:
    whole, new = unbroken("ddp", *EXACT), tmp_path / "new"
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    empty = tmp_path / "empty"
    empty.mkdir()
    start = checkpoint_path(interrupted, 3)
    cases = {
        ("--resume",): "--resume latest: --output-dir is missing",
        ("--resume", tmp_path / "none"): "there is no such file",
        ("--resume", empty): "holds no checkpoint",
        ("--resume", whole / "model.safetensors"): "is a safetensors file, but not a checkpoint",
        ("--resume", whole / "record.json"): "is incomplete or not a safetensors file",
        ("--resume", checkpoint_path(whole, 3), "--output-dir", whole): "its run is complete; there is nothing to",
        ("--resume", start, "--seed", "7"): "--seed 7: the run to resume has 42",
        ("--resume", start, "--dropout", "0.2"): "--dropout 0.2: the run to resume has 0.1",
        ("--resume", start, "--task", "text-classification"): "--task text-classification: the run to resume has",
        ("--resume", start, "--precision", "bf16"): "--precision bf16: the run to resume has fp32",
        ("--resume", start, "--num-processes", "3"): "--global-batch-size 32 is not a multiple of the 3 ranks",
        ("--resume", start, "--overwrite", "--output-dir", interrupted): "--overwrite would remove the checkpoint",
        ("--resume", start, "--diagnose"): "--diagnose measures whole runs",
        ("--resume", start, "--output-dir", whole): "already holds a run",
    }
    for arguments, message in cases.items():
        place = () if "--output-dir" in arguments or arguments == ("--resume",) else ("--output-dir", new)
        done = lockstep("ddp", *arguments, *place, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stdout)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not new.exists()
    assert {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")} == before


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default(tmp_path: Path) -> None:
    config = run_config("ddp", 2, tmp_path, micro_batch_size=16, task_settings={"dropout": 0.1})
    options = RunOptions.model_validate(config.model_dump(include={*RunOptions.model_fields}))
    start = Start(tmp_path, CheckpointState.model_construct(config=config))
    check_same_trajectory(start, options, TokenTaggingSettings(dropout=0.1))
    with pytest.raises(UsageError, match="--hidden-size 13: the run to resume has 12"):
        check_same_trajectory(start, options, TokenTaggingSettings(dropout=0.1, hidden_size=13))
    with pytest.raises(UsageError, match=r"--dropout 0.0: the run to resume has 0.1"):
        check_same_trajectory(start, options, TokenTaggingSettings())


@pytest.mark.slow
def test_other_data_are_noticed(tmp_path: Path) -> None:
    """The file that was trained on has changed."""
    rows, run = tmp_path / "rows.csv", tmp_path / "run"
    text = "text,label\n" + "".join(f"some words {n},{n % 2}\n" for n in range(40))
    rows.write_text(text)
    options = ("--train-file", rows, "--validation-file", rows, "--max-seq-length", "16", "--model", "bert-tiny")
    train("single", run, *options, "--max-steps", "4", "--save-every", "2")
    rows.write_text(text.replace("some", "other"))
    done = lockstep("single", "--resume", checkpoint_path(run, 2), "--output-dir", tmp_path / "on")
    assert done.returncode == 1
    assert "the data or the model is not that of the checkpoint" in done.stderr


@pytest.mark.slow
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start_lockstep("ddp", "--task", "tests.faulty:SlowTask", "--save-every", "1", "--output-dir", run)
    wait_for_steps(run)
    done = lockstep("ddp", "--resume", "--output-dir", run)
    assert done.returncode == 2
    assert "its run is still running (rank 0 is process" in done.stderr
    job.terminate()
    assert job.wait(timeout=180) == 75


@pytest.mark.slow
def test_latest_of_a_complete_run_is_done(unbroken: UnbrokenRuns) -> None:
    """A queue that starts the same command once more wants no error."""
    whole = unbroken("ddp", *EXACT)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    done = lockstep("ddp", *RUN, "--resume", "latest", "--output-dir", whole)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the run in {whole} is complete; there is nothing to resume\n"
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_latest_of_nothing_begins(tmp_path: Path) -> None:
    """The same command starts a job and goes on with it, as a queue that starts jobs again needs."""
    options = ("--task", "token-tagging", "--max-steps", "2", "--resume", "latest", "--output-dir", tmp_path / "run")
    done = lockstep("single", *options)
    assert done.returncode == 0, done.stderr
    assert "there is no checkpoint yet; starting from the beginning" in done.stdout
