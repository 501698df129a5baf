"""BatchNorm over the samples of all ranks: N ranks end where one process ends, and nothing else changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from backends.interface import BackendOptions
from backends.registry import reference_backend
from records.checkpoint import checkpoint_path
from tests.launching import DISTRIBUTED, lockstep, require_backend, train
from training.batch_norm import StatisticsOfRanks, batch_norms
from training.plan import Layout, Plan

SYNC = "--sync-batchnorm"
# Of 50 images in batches of 12, the last one has two, so that one of three ranks has none.
IMAGES = (
    *("--task", "image-classification", "--dtype", "float64", "--num-train-samples", "50"),
    *("--num-validation-samples", "20", "--global-batch-size", "12", "--num-train-epochs", "2"),
    *("--optimizer", "sgd", "--momentum", "0.9", "--learning-rate", "0.05"),
)
NORMED = ("--task", "tests.normed:NormedTask", "--num-processes", "2", "--max-steps", "6")
_RANKS = [2, pytest.param(3, marks=pytest.mark.slow)]


def _options(num_processes: int) -> tuple[str, ...]:
    """Two micro-steps, whatever the number of ranks."""
    return (*IMAGES, "--num-processes", str(num_processes), "--micro-batch-size", str(6 // num_processes))


def _distance(run: Path, other: Path) -> float:
    """The largest difference of all weights and running statistics, relative to the largest of each tensor."""
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (run, other))
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1)) for name in theirs
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with torch's own BatchNorm."""
    run = tmp_path_factory.mktemp("alone") / "run"
    record = train("single", run, *_options(1))
    assert record["num_batch_norms"] > 0
    assert record["warnings"] == []
    return run


@pytest.mark.parametrize("num_processes", _RANKS)
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_ranks_end_where_one_process_ends(tmp_path: Path, alone: Path, backend: str, num_processes: int) -> None:
    require_backend(backend)
    record = train(backend, tmp_path / "run", *_options(num_processes), SYNC)
    assert _distance(tmp_path / "run", alone) < 1e-12
    assert record["quality"] == pytest.approx(json.loads((alone / "record.json").read_text())["quality"])
    assert (record["warnings"], record["differing_buffers"]) == ([], [])
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1


@pytest.mark.parametrize("num_processes", _RANKS)
def test_without_it_they_do_not_and_the_run_says_why(tmp_path: Path, alone: Path, num_processes: int) -> None:
    """It still ends well, with a best model, after a stop that patience has decided, and from a checkpoint."""
    run = tmp_path / "run"
    best = ("--metric-for-best-model", "accuracy", "--early-stopping-patience", "2", "--save-every", "3")
    # In float64, the place of a loss among those that are summed together decides its last bit.
    record = train("ddp", run, *_options(num_processes), *best, "--keep", "9", "--logging-steps", "1")
    assert _distance(run, alone) > 1e-3
    (warning,) = record["warnings"]
    assert warning == (
        f"{record['num_batch_norms']} layer(s) of BatchNorm take the statistics of each rank's own samples, so the "
        f"result of {num_processes} ranks differs from single-process training; --sync-batchnorm takes those of all "
        "ranks; the running statistics of rank 0 are used for evaluation and saved"
    )
    assert record["differing_buffers"]
    again = tmp_path / "again"
    resumed = train("ddp", again, "--resume", checkpoint_path(run, 3))
    assert resumed["steps"] == record["steps"]
    assert _distance(again, run) == 0


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_one_process(tmp_path: Path, alone: Path) -> None:
    """With as many micro-steps, unless others are asked for."""
    run = tmp_path / "run"
    train("ddp", run, *_options(2), SYNC, "--save-every", "3", "--keep", "9")
    resume = ("--num-processes", "1", "--resume", checkpoint_path(run, 3))
    train("single", tmp_path / "on", *resume)
    assert _distance(tmp_path / "on", alone) < 1e-12
    other = lockstep("single", *resume, "--micro-batch-size", "12", "--output-dir", tmp_path / "other")
    assert "a step has 1 micro-step(s) and had 2: BatchNorm takes statistics of other samples" in other.stdout
    refused = lockstep("ddp", "--resume", checkpoint_path(run, 3), "--no-sync-batchnorm", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--sync-batchnorm False: the run to resume has True" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(tmp_path: Path, precision: str) -> None:
    options = ("--task", "image-classification", "--num-train-samples", "320", "--num-validation-samples", "100")
    record = train("ddp", tmp_path / "run", *options, "--num-processes", "2", "--precision", precision, SYNC)
    assert record["steps"][-1]["loss"] < 0.7 * record["steps"][0]["loss"]
    assert record["differing_buffers"] == []


def test_other_buffers_are_still_warned_of(tmp_path: Path) -> None:
    record = train("ddp", tmp_path / "run", *NORMED, SYNC)
    (warning,) = record["warnings"]
    assert "2 buffer(s) change in training (num_ones, is_odd)" in warning
    assert "BatchNorm" not in warning


def _layers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    return {
        "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
        "1d-sequence": (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3, 5)),
        "2d": (lambda: nn.BatchNorm2d(3, eps=1e-3), (4, 3, 5, 2)),
        "3d": (lambda: nn.BatchNorm3d(3, affine=False), (2, 3, 2, 2, 2)),
        "without-running-statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 5, 2)),
    }


@pytest.mark.parametrize("name", _layers())
def test_one_rank_computes_what_torch_computes(name: str) -> None:
    make, shape = _layers()[name]
    torch.manual_seed(0)
    ours, theirs = make().double(), make().double()
    StatisticsOfRanks(reference_backend(BackendOptions())).attach(batch_norms(ours))
    for _ in range(3):
        values = 3 + 2 * torch.randn(shape, dtype=torch.float64)
        results = []
        for layer in (ours, theirs):
            given = values.clone().requires_grad_()
            result = layer(given)
            result.square().mul(torch.arange(result.numel()).reshape(shape)).sum().backward()
            results.append([result, given.grad, *(one.grad for one in layer.parameters()), *layer.buffers()])
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(ours.eval()(values), theirs.eval()(values), rtol=1e-12, atol=1e-12)


def test_a_model_is_left_as_the_task_has_made_it() -> None:
    """So that a task can save it whole: nothing of ranks and of their group is left in it."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = [set(vars(layer)) for layer in model]
    ranks = StatisticsOfRanks(reference_backend(BackendOptions()))
    ranks.attach(batch_norms(model))
    assert "forward" in vars(model[0])
    ranks.detach()
    ranks.detach()
    assert [set(vars(layer)) for layer in model] == before
    same = pickle.loads(pickle.dumps(model))
    values = torch.randn(5, 3)
    torch.testing.assert_close(same(values), model(values))


def test_a_task_may_save_its_model_with_all_attributes(tmp_path: Path) -> None:
    options = ("--task", "tests.normed:PickledTask", "--num-processes", "2", "--max-steps", "2")
    train("ddp", tmp_path / "run", *options, SYNC)
    assert (tmp_path / "run" / "model.pickle").exists()


def test_a_layer_that_computes_something_of_its_own_is_refused() -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, values: torch.Tensor) -> Any:
            return super().forward(values) + 1

    ranks = StatisticsOfRanks(reference_backend(BackendOptions()))
    with pytest.raises(ValueError, match="--sync-batchnorm: 0 is a Own, which computes something of its own"):
        ranks.attach(batch_norms(nn.Sequential(Own(3))))
    with pytest.raises(ValueError, match="the model has no BatchNorm in training"):
        ranks.attach(batch_norms(nn.Sequential(nn.BatchNorm2d(3)).eval()))


@pytest.mark.parametrize("num_samples", range(1, 30))
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_micro_step_has_the_samples_of_one_process(num_samples: int, world_size: int) -> None:
    def micro_steps(num_ranks: int, size: int) -> list[list[int]]:
        plan = Plan(
            num_samples=num_samples,
            global_batch_size=2 * size * num_ranks,
            micro_batch_size=size,
            world_size=num_ranks,
            seed=1,
            layout=Layout("padded", None, by_micro_step=True),
        )
        shares = [plan.micro_batches(np.arange(num_samples), rank) for rank in range(num_ranks)]
        assert all(len(one.sample_ids) <= size for share in shares for one in share)
        return [
            [int(sample) for one in together if one.weight for sample in one.sample_ids]
            for together in zip(*shares, strict=True)
        ]

    assert micro_steps(world_size, 3) == micro_steps(1, 3 * world_size)
