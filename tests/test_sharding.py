"""Backends under which each rank holds a part of each weight: what a rank holds, and what is made whole again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backends.registry import BACKENDS, find_backend
from launch.options import read_options
from launch.resolve import settle
from records.checkpoint import list_checkpoints, read_checkpoint
from tests.launching import lockstep, train
from watch.heartbeat import own_phases

SHARDED = [name for name, row in BACKENDS.items() if row.capabilities.shards_weights]
BERT = ("--model", "bert-tiny", "--max-seq-length", "32", "--max-steps", "4", "--num-processes", "2")
FEW = ("--task", "token-tagging", "--max-steps", "6", "--save-every", "2", "--keep", "9")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run in which each rank holds all of BERT."""
    return train("ddp", tmp_path_factory.mktemp("whole") / "run", *BERT, "--save-every", "4")


@pytest.mark.parametrize("backend", SHARDED)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [(), ("--no-reshard-after-forward",)], ids=lambda options: "".join(options)[5:])
def test_a_rank_holds_its_part(
    tmp_path: Path, whole: dict[str, Any], backend: str, precision: str, options: tuple[str, ...]
) -> None:
    record = train(backend, tmp_path / "run", *BERT, "--precision", precision, *options)
    theirs = whole["ranks"][0]["memory"]
    for rank in record["ranks"]:
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            # A row more or less, where a weight has an odd number of them.
            assert rank["memory"][name] == pytest.approx(theirs[name] / 2, rel=0.02), name
        assert rank["memory"]["buffer_bytes"] == theirs["buffer_bytes"]
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1
    if precision == "fp32":
        for ours, step in zip(record["steps"], whole["steps"], strict=True):
            assert ours["loss"] == pytest.approx(step["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_ranks_wait_for_each_other_in_the_forward_pass(sync_batchnorm: bool) -> None:
    """The time that this takes is not a rank's own, and whoever waits there does not hang."""
    for name, row in BACKENDS.items():
        waits = row.capabilities.waits_in_forward(sync_batchnorm=sync_batchnorm)
        assert waits == (sync_batchnorm or name in SHARDED)
        assert own_phases(waits_in_forward=waits) == (("data",) if waits else ("data", "forward"))


@pytest.mark.parametrize("backend", ["ddp", *SHARDED])
def test_the_launcher_knows_where_ranks_wait_for_each_other(backend: str) -> None:
    row = find_backend(backend)
    asked = read_options(backend, row.settings, ["--num-processes=2", "--device=cpu", "--task=token-tagging"])
    job = settle(backend, row, asked, started_at=0.0, noted=[]).job
    assert job is not None
    assert job.waits_in_forward == (backend in SHARDED)


@pytest.mark.parametrize("backend", SHARDED)
def test_the_model_and_the_checkpoint_are_whole(tmp_path: Path, whole: dict[str, Any], backend: str) -> None:
    train(backend, tmp_path / "run", *BERT, "--save-every", "2")
    directories = (tmp_path / "run", Path(whole["config"]["output_dir"]))
    ours, theirs = (load_file(directory / "model.safetensors") for directory in directories)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    saved = read_checkpoint(list_checkpoints(tmp_path / "run")[0])
    assert all(saved.tensors[f"model.{name}"].shape == tensor.shape for name, tensor in theirs.items())


@pytest.mark.parametrize("backend", SHARDED)
@pytest.mark.parametrize(("num_processes", "batch_size"), [(2, 23), (4, 5), (4, 23)])
def test_ranks_without_a_batch_take_part_in_an_evaluation(
    tmp_path: Path, backend: str, num_processes: int, batch_size: int
) -> None:
    """With 23 samples: one batch for all ranks, or five for four of them."""
    options = (*FEW, "--eval-batch-size", str(batch_size))
    record = train(backend, tmp_path / "parts", *options, "--num-processes", str(num_processes))
    alone = train("single", tmp_path / "single", *options)
    for ours, theirs in zip(record["evaluations"], alone["evaluations"], strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", SHARDED)
@pytest.mark.parametrize(
    "options",
    [
        ("--metric-for-best-model", "loss"),
        ("--metric-for-best-model", "loss", "--early-stopping-patience", "1"),
        ("--save-every", "0.001min"),
        ("--diagnose",),
        ("--trace", "2"),
        ("--on-nan", "skip"),
        ("--micro-batch-size", "4"),
        ("--optimizer", "sgd", "--momentum", "0.9"),
        ("--no-evaluate", "--save-every", "never"),
    ],
    ids=" ".join,
)
def test_what_all_ranks_must_take_part_in(tmp_path: Path, backend: str, options: tuple[str, ...]) -> None:
    """No rank waits for another that does not come."""
    done = lockstep(backend, *FEW, "--timeout", "20", *options, "--output-dir", tmp_path / "run", timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("backend", SHARDED)
@pytest.mark.parametrize(
    ("options", "value"),
    [
        (("--find-unused-parameters",), "--find-unused-parameters"),
        (("--torch-compile",), "--torch-compile"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, backend: str, options: tuple[str, ...], value: str) -> None:
    done = lockstep(backend, *FEW, *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert value in line
    assert not (tmp_path / "run").exists()
