"""Ranks whose weights differ: parameters end the run, buffers of rank 0 count, and no finished training is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from records.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, read_checkpoint, without_prefix
from tests.launching import WHOLE, lockstep, require_backend, train
from tests.normed import NormedSettings, NormedTask
from training.agreement import checksum
from training.plan import evaluation_batches

NORMED = ("--task", "tests.normed:NormedTask", "--num-processes", "2", "--max-steps", "6")
DRIFTING = ("tests.faulty_backends:DriftingBackend", "--task", "token-tagging", "--num-processes", "2")


def _flipped(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    """A copy with one bit changed."""
    copy = tensor.clone().contiguous()
    content = copy.reshape(-1).view(torch.uint8)
    content[place] ^= 1 << bit
    return copy


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(1000),
        torch.rand(3, 7, dtype=torch.float64),
        torch.rand(5).to(torch.bfloat16),
        torch.arange(9),
        torch.tensor([1, 2, 3], dtype=torch.int8),
        torch.rand(4, 6).T,
        torch.tensor(0.0),
        torch.rand(2_500_001),
    ],
    ids=["float32", "float64", "bfloat16", "int64", "int8", "transposed", "0-d", "several pieces"],
)
def test_a_checksum_tells_every_bit(tensor: torch.Tensor) -> None:
    whole = checksum(tensor)
    assert checksum(tensor.clone()) == whole
    size = tensor.numel() * tensor.element_size()
    for place in {0, size // 2, size - 1}:
        for bit in range(8):
            assert checksum(_flipped(tensor, place, bit)) != whole


def test_a_checksum_tells_places_and_signs() -> None:
    tensor = torch.rand(64, dtype=torch.float64)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([True, False])) != checksum(torch.tensor([False, True]))
    # Changes whose plain sum, and whose sum weighted by places, are nothing.
    numbers = torch.arange(10, 20)
    assert checksum(numbers + torch.tensor([1, -2, 1, *[0] * 7])) != checksum(numbers)


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ddp that saves every step."""
    run = tmp_path_factory.mktemp("normed") / "ddp"
    train("ddp", run, *NORMED, "--save-every", "1", "--keep", "100")
    return run


def _evaluated(run: Path, step: int) -> dict[str, float | None]:
    """What one process evaluates of a checkpoint."""
    task = NormedTask(NormedSettings())
    checkpoint = read_checkpoint(checkpoint_path(run, step))
    model = task.build_model()
    model.load_state_dict(without_prefix("model", checkpoint.tensors))
    buffers = dict(model.named_buffers())
    for name, content in without_prefix("buffer", checkpoint.tensors).items():
        buffers[name].copy_(content)
    model.eval()
    batches = evaluation_batches(task.num_samples("validation"), batch_size=64, share=(0, 1))
    with torch.no_grad():
        rows = [task.evaluation_rows(model, task.collate("validation", ids)) for ids in batches]
    return task.metrics(torch.cat(rows))


def test_buffers_that_change_are_those_of_rank_0(normed: Path) -> None:
    record = json.loads((normed / "record.json").read_text())
    assert record["status"] == "completed"
    assert {"norm.running_mean", "norm.running_var", "num_ones"} <= set(record["differing_buffers"])
    assert record["disagreement"] is None
    (warning,) = record["warnings"]
    assert "change in training" in warning
    assert "norm.running_mean" in warning
    for step in (2, 4):
        (evaluation,) = [one for one in record["evaluations"] if one["step"] == step]
        assert evaluation["metrics"] == pytest.approx(_evaluated(normed, step), rel=1e-12)
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1


@pytest.mark.parametrize("backend", WHOLE)
def test_it_goes_on_under_any_backend_with_the_same_bits(tmp_path: Path, normed: Path, backend: str) -> None:
    """After a step without an evaluation; what no state_dict has is restored, too."""
    require_backend(backend)
    done = lockstep(
        backend, "--task", NORMED[1], "--resume", checkpoint_path(normed, 3), "--output-dir", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING: " in done.stdout
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (normed / "model.safetensors").read_bytes()
    ours, theirs = (json.loads((run / "record.json").read_text()) for run in (tmp_path / "run", normed))
    assert ours["steps"] == theirs["steps"]
    assert [one["metrics"] for one in ours["evaluations"]] == [one["metrics"] for one in theirs["evaluations"]]


def test_a_frozen_batch_norm_is_no_matter(tmp_path: Path) -> None:
    record = train("ddp", tmp_path / "run", *NORMED, "--frozen")
    assert (record["warnings"], record["differing_buffers"]) == ([], [])


def test_buffers_that_differ_in_shape_are_left_to_each_rank(tmp_path: Path) -> None:
    """Neither do the ranks wait for each other, nor is such a checkpoint refused."""
    run, task = tmp_path / "run", ("--task", "tests.normed:GrowingTask")
    options = ("--num-processes", "2", "--max-steps", "4", "--save-every", "1", "--keep", "9")
    record = train("ddp", run, *task, *options)
    assert record["differing_buffers"] == []
    changed, unequal = record["warnings"]
    assert changed.startswith("2 buffer(s) change in training (cache, unused)")
    assert unequal.startswith("not all ranks have the same buffers with the same shapes (cache): each rank evaluates")
    train("ddp", tmp_path / "on", *task, "--resume", checkpoint_path(run, 3))
    assert (tmp_path / "on" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def _fails(run: Path, *options: str) -> tuple[str, dict[str, Any]]:
    done = lockstep(*DRIFTING, *options, "--output-dir", run)
    assert done.returncode == 1, done.stdout
    assert not (run / "model.safetensors").exists()
    record: dict[str, Any] = json.loads((run / "record.json").read_text())
    assert record["status"] == "failed"
    return done.stderr, record


def test_a_drift_is_found_at_the_next_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stderr, record = _fails(run, "--drift-step", "3", "--max-steps", "20")
    assert "failed: rank 1 (" in stderr
    assert "the weights of rank 1 differ from those of rank 0 after step 4 (after step 2 they still agreed)" in stderr
    assert "1 parameter(s), embedding.weight; look for" in stderr
    assert record["disagreement"] == {
        "step": 4,
        "agreed_step": 2,
        "ranks": [1],
        "parameters": ["embedding.weight"],
        "buffers": [],
    }
    assert [one["step"] for one in record["evaluations"]] == [2]


def test_a_drift_is_found_before_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, record = _fails(run, "--drift-step", "3", "--max-steps", "20", "--save-every", "1")
    assert record["disagreement"]["step"] == 3
    assert [checkpoint_step(path) for path in list_checkpoints(run)] == [2, 1]


def test_a_drift_that_is_found_at_the_end_costs_no_model(tmp_path: Path) -> None:
    run, sound = tmp_path / "run", tmp_path / "sound"
    done = lockstep(*DRIFTING, "--drift-step", "3", "--max-steps", "3", "--output-dir", run)
    assert done.returncode == 3, done.stderr
    assert "DIVERGED" in done.stdout
    assert "lockstep: the model is that of rank 0: the weights of rank 1 differ" in done.stderr  # for races, too
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "diverged"
    assert "the weights of rank 1 differ from those of rank 0 after step 3" in record["error"]
    assert record["disagreement"]["parameters"] == ["embedding.weight"]
    expected = train("ddp", sound, *DRIFTING[1:], "--max-steps", "3")
    assert (run / "model.safetensors").read_bytes() == (sound / "model.safetensors").read_bytes()
    assert record["quality"] == expected["quality"]
    again = lockstep(*DRIFTING, "--max-steps", "3", "--resume", "latest", "--output-dir", run)
    assert again.returncode == 3
    assert again.stdout == (
        f"the run in {run} has finished, but its ranks diverged; the model of rank 0 was saved; "
        "there is nothing to resume\n"
    )
    assert json.loads((run / "record.json").read_text()) == record


def test_a_run_without_evaluations_compares_its_ranks_at_its_end(tmp_path: Path) -> None:
    done = lockstep(
        *DRIFTING, "--drift-step", "3", "--max-steps", "5", "--no-evaluate", "--output-dir", tmp_path / "run"
    )
    assert done.returncode == 3, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["evaluations"], record["quality"]) == ([], {})
    assert record["disagreement"]["step"] == 5
    sound = train("ddp", tmp_path / "sound", *DRIFTING[1:], "--max-steps", "5", "--no-evaluate")
    assert (sound["status"], sound["evaluations"]) == ("completed", [])
    refused = lockstep(*DRIFTING, "--no-evaluate", "--metric-for-best-model", "accuracy", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--metric-for-best-model accuracy needs evaluations, which --no-evaluate turns off" in refused.stderr


@pytest.mark.parametrize(("drift_step", "code"), [(4, 3), (2, 1)])
def test_a_drift_where_patience_ends(tmp_path: Path, drift_step: int, code: int) -> None:
    """The evaluation that ends the run is the last; one that could have, but was the best, is not."""
    run = tmp_path / "run"
    options = ("--metric-for-best-model", "accuracy", "--early-stopping-patience", "1", "--learning-rate", "1e-12")
    done = lockstep(*DRIFTING, "--drift-step", str(drift_step), "--max-steps", "20", *options, "--output-dir", run)
    assert done.returncode == code, done.stderr
    record = json.loads((run / "record.json").read_text())
    assert record["disagreement"]["step"] == drift_step
    assert record["best_step"] == (2 if code == 3 else None)
    assert ("lockstep: the model is that of step 2, when all ranks still had equal weights: " in done.stderr) == (
        code == 3
    )
    assert [checkpoint_step(path) for path in list_checkpoints(run)] == ([2] if code == 3 else [])
