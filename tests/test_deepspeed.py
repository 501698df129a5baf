"""DeepSpeed: what a rank holds, checkpoints that any backend goes on with, and what is refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.flat_parts import FlatPart, PartsOptimizer, Place
from backends.registry import BACKENDS
from records.checkpoint import checkpoint_path
from tests.launching import IN_FLOAT32, lockstep, require_backend, train
from tests.resuming import UnbrokenRuns, assert_equal_to_rounding, assert_same_run
from tests.sparing import in_ci

FLOAT32 = ("--dtype", "float32")
TWO = (*FLOAT32, "--num-processes", "2", "--micro-batch-size", "8")
FEW = ("--task", "token-tagging", "--max-steps", "3", "--save-every", "never", *FLOAT32)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    return UnbrokenRuns(tmp_path_factory)


def test_it_is_the_one_backend_without_float64() -> None:
    assert IN_FLOAT32 == ["deepspeed"]


@pytest.mark.parametrize("stage", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_it_goes_on_where_it_stopped(tmp_path: Path, unbroken: UnbrokenRuns, stage: str) -> None:
    whole = unbroken("deepspeed", *TWO, "--zero-stage", stage)
    train("deepspeed", tmp_path / "run", "--resume", checkpoint_path(whole, 3))
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "num_processes"),
    [
        ("deepspeed", "ddp", 2),
        ("ddp", "deepspeed", 2),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                *(("deepspeed", "fsdp2", 2), ("fsdp2", "deepspeed", 2), ("horovod", "deepspeed", 2)),
                *(("deepspeed", "single", 1), ("ddp", "deepspeed", 4), ("deepspeed", "deepspeed", 4)),
            )
        ),
    ],
)
def test_any_backend_goes_on(
    tmp_path: Path, unbroken: UnbrokenRuns, saved_by: str, resumed_by: str, num_processes: int
) -> None:
    require_backend(resumed_by)
    whole = unbroken(saved_by, *TWO)
    options = ("--num-processes", str(num_processes), "--micro-batch-size", "8")
    record = train(resumed_by, tmp_path / "run", "--resume", checkpoint_path(whole, 3), *options)
    assert record["resumed_from"]["backend"] == saved_by
    assert_equal_to_rounding(tmp_path / "run", whole, rel=1e-4)


@pytest.mark.parametrize("stage", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_rank_holds_a_part_of_the_optimizer_state(tmp_path: Path, stage: str) -> None:
    require_backend("deepspeed")
    bert = ("--model", "bert-tiny", "--max-seq-length", "32", "--max-steps", "3", "--num-processes", "2")
    record = train("deepspeed", tmp_path / "parts", *bert, "--zero-stage", stage)
    whole = train("ddp", tmp_path / "whole", *bert)
    theirs = whole["ranks"][0]["memory"]
    for rank in record["ranks"]:
        memory = rank["memory"]
        assert memory["parameter_bytes"] == pytest.approx(theirs["parameter_bytes"], rel=0.001)
        # Both moments of half of the elements, and the copy of these that is updated.
        expected = theirs["optimizer_bytes"] / 2 + theirs["parameter_bytes"] / 2
        assert memory["optimizer_bytes"] == pytest.approx(expected, rel=0.001)
        # Averages of half of the elements, and whatever lies in the same memory.
        assert memory["gradient_bytes"] > 0.49 * theirs["gradient_bytes"]
        assert rank["effective_settings"]["zero_stage"] == int(stage)
    for ours, step in zip(record["steps"], whole["steps"], strict=True):
        assert ours["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("numbers_of_ranks", in_ci(["2"], ["2", "2,3"]))
def test_the_second_stage_keeps_the_contract(numbers_of_ranks: str) -> None:
    """Gradients, weights, clipping and traffic: all that parts of averaged gradients could change."""
    require_backend("deepspeed")
    which = ("--num-processes", numbers_of_ranks, "--check", "C16,C17,C20,C24,C26,C27")
    done = lockstep("contract", "deepspeed", "--zero-stage", "2", *which)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepspeed --zero-stage 2 on cpu: 6 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--metric-for-best-model", "loss", "--save-every", "1"),
        ("--save-every", "0.001min"),
        ("--diagnose",),
        ("--on-nan", "skip", "--optimizer", "sgd", "--momentum", "0.9"),
        ("--start-method", "torchrun", "--precision", "bf16", "--zero-stage", "2", "--micro-batch-size", "4"),
    ],
    ids=" ".join,
)
def test_no_rank_waits_for_another(tmp_path: Path, options: tuple[str, ...]) -> None:
    require_backend("deepspeed")
    done = lockstep("deepspeed", *FEW, "--timeout", "20", *options, "--output-dir", tmp_path / "run", timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--zero-stage 3", "--zero-stage 3: under deepspeed, each rank holds all weights"),
        ("--zero-stage 0", "--zero-stage"),
        ("--find-unused-parameters", "--find-unused-parameters: deepspeed does not support it"),
        ("--precision fp16", "the overflows of its own part"),
        ("--grad-compression bf16", "--grad-compression bf16: deepspeed cannot send gradients as bf16"),
        ("--torch-compile", "--torch-compile"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, options: str, words: str) -> None:
    require_backend("deepspeed")
    done = lockstep("deepspeed", *FEW, *options.split(), "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
    assert not (tmp_path / "run").exists()


def test_a_model_in_float64_is_refused_by_name(tmp_path: Path) -> None:
    require_backend("deepspeed")
    done = lockstep("deepspeed", *FEW[:-2], "--num-processes", "1", "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "deepspeed cannot train embedding.weight, which is torch.float64" in done.stderr


@pytest.mark.parametrize("version", ["0.19.7", "0.9.10", "0.18"])
def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("backends.deepspeed_settings.metadata.version", lambda _: version)
    reason = BACKENDS["deepspeed"].unavailable_reason()
    assert reason is not None
    assert reason.startswith(f"deepspeed {version} may leave the average over ranks out")
    assert "pip install deepspeed==0.19.8" in reason


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("backends.deepspeed_settings.metadata.version", missing)
    reason = BACKENDS["deepspeed"].unavailable_reason()
    assert reason is not None
    assert reason.startswith("deepspeed is not installed; run launch/run.sh deepspeed")


def _optimizers() -> tuple[torch.optim.Optimizer, PartsOptimizer]:
    """Of two parameters, of which this rank updates the last two elements of one, and the first of the other."""
    flat = torch.optim.AdamW([torch.zeros(4, requires_grad=True)])
    places = [Place(0, 4, 2, torch.Size([2, 3])), Place(2, 0, 1, torch.Size([5]))]
    return flat, PartsOptimizer(flat, [places])


def _state(steps: tuple[float, float]) -> dict[str, Any]:
    _, parts = _optimizers()
    one, other = (torch.arange(6.0).view(2, 3), 10 + torch.arange(5.0))
    moments = [part.cut(whole) for part, whole in zip(parts.param_groups[0]["params"], (one, other), strict=True)]
    state = {
        number: {"step": torch.tensor(step), "exp_avg": moment, "exp_avg_sq": moment}
        for number, (step, moment) in enumerate(zip(steps, moments, strict=True))
    }
    return {**parts.state_dict(), "state": state}


def test_parts_of_parameters_become_one_vector() -> None:
    flat, parts = _optimizers()
    parts.load_state_dict(_state((3.0, 3.0)))
    (state,) = flat.state.values()
    assert state["exp_avg"].tolist() == [4, 5, 10, 0]
    assert state["step"] == 3
    again = [value["exp_avg"] for value in parts.state_dict()["state"].values()]
    assert [part.to_local().tolist() for part in again] == [[4, 5], [10]]
    assert [tuple(part.shape) for part in again] == [(2, 3), (5,)]


def test_a_state_is_loaded_into_the_tensors_of_the_one_before() -> None:
    """DeepSpeed keeps views of them from the first step on: new ones would be in memory beside them."""
    flat, parts = _optimizers()
    parts.load_state_dict(_state((3.0, 3.0)))
    (state,) = flat.state.values()
    vector = state["exp_avg"].zero_()
    parts.load_state_dict(_state((4.0, 4.0)))
    (state,) = flat.state.values()
    assert state["exp_avg"] is vector
    assert vector.tolist() == [4, 5, 10, 0]
    assert state["step"] == 4
    parts.load_state_dict(parts.state_dict())
    assert vector.tolist() == [4, 5, 10, 0]
    parts.load_state_dict({**parts.state_dict(), "state": {}})
    assert not flat.state


def test_a_vector_has_one_number_of_steps() -> None:
    _, parts = _optimizers()
    with pytest.raises(ValueError, match="different numbers of steps"):
        parts.load_state_dict(_state((3.0, 2.0)))


def test_nobody_computes_with_a_part_as_if_it_were_the_whole() -> None:
    part = FlatPart(torch.zeros(2), Place(0, 0, 2, torch.Size([3])))
    with pytest.raises(NotImplementedError, match="make it whole first"):
        part + 1
