"""When two trainings count as the same: bits, rounding, or neither, on records with known distances."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compare.report.grouping import EntrantRuns
from compare.report.machines import located
from compare.report.references import entrant_parity
from compare.report.runs import RaceFacts, Run
from parity.judge import diagnosed_parity, losses_parity, normalised_otherwise
from parity.judge import parity_in_equal_parts as in_equal_parts
from records.environment import describe_environment
from records.record import RunRecord
from tests.launching import run_config

NUM_STEPS = 8
Weights = dict[str, npt.NDArray[np.float64]]


def _trajectory(noise: float = 0.0, seed: int = 0) -> list[Weights]:
    """Weights before and after each step; noise grows as rounding does."""
    random = np.random.default_rng(seed)
    moments: list[Weights] = []
    for step in range(NUM_STEPS + 1):
        exact = {"layer.weight": np.arange(1.0, 9.0) + step, "layer.bias": np.zeros(8) + 0.01 * step}
        apart = noise * step
        moments.append({name: weight + apart * random.standard_normal(8) for name, weight in exact.items()})
    return moments


def _record(
    moments: list[Weights],
    *,
    losses: list[float | None] | None = None,
    norms: list[float | None] | None = None,
    skipped: tuple[int, ...] = (),
    accuracy: float | None = 0.9,
    **options: Any,
) -> RunRecord:
    config = run_config("ddp", 2, Path("/nowhere"), started_at=time.time(), micro_batch_size=16, **options)
    names = list(moments[0])
    sketches = [
        [[cell if math.isfinite(cell) else None for cell in moment[name].tolist()] for name in names]
        for moment in moments
    ]
    digests = [[hashlib.sha256(moment[name].tobytes()).hexdigest()[:16] for name in names] for moment in moments]
    seconds = [1.0] * NUM_STEPS
    diagnosis = {
        "whole_seconds": seconds,
        "data_seconds": seconds,
        "first_seconds": seconds,
        "alone_seconds": dict.fromkeys(("forward", "backward", "optimizer"), seconds),
        "inner_dtype": "float32",
        "reductions": [{}],
        "num_reductions": [0],
        "interface": "lo",
        "sent_bytes": None,
        "gradient_bytes": 64,
        "parameters": names,
        "digests": digests,
        "sketches": sketches,
    }
    rank = {
        **{"rank": 0, "local_rank": 0, "hostname": "here", "device": "cpu", "num_threads": 1, "cpu_seconds": 1.0},
        **{"step_seconds": seconds, "samples": [1] * NUM_STEPS, "tokens": [1] * NUM_STEPS},
        **{"positions": [1] * NUM_STEPS, "peak_memory_bytes": 1, "peak_cuda_memory_bytes": None},
        **{"schedule_steps": NUM_STEPS, "effective_settings": {}, "diagnosis": diagnosis},
        "weights_sha256": hashlib.sha256(repr(digests[-1]).encode()).hexdigest(),
    }
    steps = [
        {
            **{"step": step, "epoch": 0, "num_samples": 1, "learning_rate": 0.1, "skipped": step in skipped},
            "loss": (losses or [1.0] * NUM_STEPS)[step - 1],
            "grad_norm": (norms or [2.0] * NUM_STEPS)[step - 1],
        }
        for step in range(1, NUM_STEPS + 1)
    ]
    evaluation = {"step": NUM_STEPS, "epoch": 0, "seconds": 1.0, "metrics": {"accuracy": accuracy}}
    return RunRecord.model_validate(
        {
            **{"status": "completed", "error": None, "config": config, "task": {}},
            **{"gradient_accumulation_steps": 1, "environment": describe_environment(with_torch=False).model_dump()},
            **{"seconds_to_first_step": 1.0, "seconds": 9.0, "steps": steps, "evaluations": [evaluation]},
            **{"quality": {"accuracy": accuracy}, "ranks": [rank]},
        }
    )


REFERENCE = _record(_trajectory())
YARDSTICK = _record(_trajectory(1e-6, seed=1))


def test_equal_weights_are_bitwise() -> None:
    assert diagnosed_parity(_record(_trajectory()), REFERENCE, YARDSTICK).verdict == "bitwise"


def test_noise_like_the_yardsticks_is_rounding() -> None:
    for seed in range(2, 30):
        parity = diagnosed_parity(_record(_trajectory(1e-6, seed=seed)), REFERENCE, YARDSTICK)
        assert parity.verdict == "rounding", parity
        assert (parity.first_step, parity.parameter) == (1, "layer.weight")


@pytest.mark.parametrize("excess", [1e-5, 1e-2])
def test_a_yardstick_that_computes_something_else_excuses_nothing(excess: float) -> None:
    """With BatchNorm, one process gets another loss from the same batch in other parts, by more than rounding."""
    third = _record(_trajectory(1e-2, seed=1), losses=[1.0 + excess, *[1.0] * (NUM_STEPS - 1)])
    parity = diagnosed_parity(_record(_trajectory(1e-2, seed=2)), REFERENCE, third)
    assert parity.verdict == ("not comparable" if excess > 1e-4 else "rounding"), parity
    if excess > 1e-4:
        assert "in step 1, one process has a loss of 1.01 with micro-batches of 16, and of 1 with 16" in parity.detail


@pytest.mark.parametrize(
    ("inner_dtype", "precision", "excess", "verdict"),
    [
        ("float32", "fp32", 3e-4, "not comparable"),
        ("float64", "fp32", 1e-6, "not comparable"),
        ("float64", "fp32", 1e-12, "rounding"),
        ("bfloat16", "bf16", 3e-4, "rounding"),
    ],
)
def test_how_much_of_a_loss_may_depend_on_the_split(
    inner_dtype: str, precision: str, excess: float, verdict: str
) -> None:
    """Far less than losses without a diagnosis may lie apart: both dtypes round finely."""
    losses: list[float | None] = [1.0 + excess, *[1.0] * (NUM_STEPS - 1)]
    run, reference = (_record(_trajectory(noise, seed=2), precision=precision) for noise in (1e-2, 0.0))
    third = _record(_trajectory(1e-2, seed=1), losses=losses, precision=precision)
    diagnosis = reference.ranks[0].diagnosis
    assert diagnosis is not None
    diagnosis.inner_dtype = inner_dtype
    parity = diagnosed_parity(run, reference, third)
    assert parity.verdict == verdict, parity


def test_a_weight_that_strays_is_named_with_its_step() -> None:
    moments = _trajectory(1e-6, seed=2)
    for moment in moments[4:]:
        moment["layer.bias"] = moment["layer.bias"] + 1e-3
    parity = diagnosed_parity(_record(moments), REFERENCE, YARDSTICK)
    assert parity.verdict == "not comparable"
    assert (parity.first_step, parity.parameter) == (4, "layer.bias")


def test_a_gradient_wrong_by_a_factor_shows_in_its_norm() -> None:
    record = _record(_trajectory(1e-6, seed=2), norms=[2.0, 2.02, *[2.0] * 6])
    parity = diagnosed_parity(record, REFERENCE, YARDSTICK)
    assert parity.verdict == "not comparable"
    assert parity.first_step == 2
    assert "gradient norm" in parity.detail


def test_other_weights_at_the_start_are_no_rounding() -> None:
    moments = _trajectory()
    moments[0]["layer.weight"] = moments[0]["layer.weight"] + 1e-9
    for parity in (
        diagnosed_parity(_record(moments), REFERENCE, YARDSTICK),
        in_equal_parts(_record(moments), REFERENCE),
    ):
        assert (parity.verdict, parity.first_step) == ("not comparable", 0)


@pytest.mark.parametrize(("noise", "verdict"), [(0.0, "bitwise"), (1e-6, "rounding"), (1.0, "not comparable")])
def test_with_batch_norm_weights_may_lie_apart_by_a_share_of_their_way(noise: float, verdict: str) -> None:
    assert in_equal_parts(_record(_trajectory(noise, seed=2)), REFERENCE).verdict == verdict


def test_a_weight_the_yardstick_left_alone_may_move_a_little() -> None:
    moments, third = _trajectory(1e-6, seed=2), _trajectory(1e-6, seed=1)
    for moment in third:
        moment["layer.bias"] = np.zeros(8)
    for moment in moments:
        moment["layer.bias"] = np.zeros(8)
    moments[5]["layer.bias"] = np.full(8, 1e-10)
    reference = [{**moment, "layer.bias": np.zeros(8)} for moment in _trajectory()]
    parity = diagnosed_parity(_record(moments), _record(reference), _record(third))
    assert parity.verdict == "rounding", parity


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_no_rounding(value: float) -> None:
    moments = _trajectory(1e-6, seed=2)
    moments[5]["layer.weight"] = np.full(8, value)
    parity = diagnosed_parity(_record(moments), REFERENCE, YARDSTICK)
    assert parity.verdict == "not comparable"
    assert (parity.first_step, parity.parameter) == (5, "layer.weight")


def test_a_loss_that_is_not_finite_on_one_side_is_no_rounding() -> None:
    record = _record(_trajectory(1e-6, seed=2), losses=[1.0, 1.0, None, *[1.0] * 5])
    assert diagnosed_parity(record, REFERENCE, YARDSTICK).first_step == 3


def test_another_skipped_step_ends_the_comparison_there() -> None:
    moments = _trajectory(1e-6, seed=2)
    for moment in moments[4:]:
        moment["layer.weight"] = moment["layer.weight"] + 1.0
    parity = diagnosed_parity(_record(moments, skipped=(4,)), REFERENCE, YARDSTICK)
    assert parity.verdict == "rounding"
    assert "up to step 3" in parity.detail
    at_once = diagnosed_parity(_record(moments, skipped=(1,)), REFERENCE, YARDSTICK)
    assert at_once.verdict == "unknown"


def test_another_metric_is_no_rounding() -> None:
    parity = diagnosed_parity(_record(_trajectory(1e-6, seed=2), accuracy=0.7), REFERENCE, YARDSTICK)
    assert parity.verdict == "not comparable"
    assert "accuracy is 0.7, not 0.9" in parity.detail


def test_another_metric_of_the_same_weights_is_an_error_of_the_evaluation() -> None:
    """They may differ by a sum in another order, but not by a sample."""
    for judged in (
        diagnosed_parity(_record(_trajectory(), accuracy=0.901), REFERENCE, YARDSTICK),
        in_equal_parts(_record(_trajectory(), accuracy=0.901), REFERENCE),
    ):
        assert judged.verdict == "not comparable"
        assert judged.detail.endswith("but metrics differ from the reference's: accuracy is 0.901, not 0.9")
    assert diagnosed_parity(_record(_trajectory(), accuracy=0.900001), REFERENCE, YARDSTICK).verdict == "bitwise"


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.901, "rounding"), (0.7, "not comparable")])
def test_with_batch_norm_metrics_are_compared_too(accuracy: float, verdict: str) -> None:
    parity = in_equal_parts(_record(_trajectory(1e-6, seed=2), accuracy=accuracy), REFERENCE)
    assert parity.verdict == verdict
    assert ("accuracy is 0.7, not 0.9" in parity.detail) == (verdict != "rounding")


def test_without_a_yardstick_losses_decide() -> None:
    noisy = _trajectory(1e-6, seed=2)
    assert diagnosed_parity(_record(noisy), REFERENCE, None).verdict == "rounding"
    strayed = diagnosed_parity(_record(noisy, losses=[1.0, 1.1, *[1.0] * 6]), REFERENCE, None)
    assert (strayed.verdict, strayed.first_step) == ("not comparable", 2)


def test_with_dropout_another_split_cannot_be_judged_by_losses() -> None:
    ours, theirs = _record(_trajectory(1e-6, seed=2)), _record(_trajectory())
    ours.task["dropout"] = theirs.task["dropout"] = 0.1
    assert losses_parity(ours, theirs).verdict == "rounding"
    theirs.config.num_processes = 1
    assert losses_parity(ours, theirs).verdict == "unknown"
    ours.task["dropout_by_sample"] = theirs.task["dropout_by_sample"] = True
    assert losses_parity(ours, theirs).verdict == "rounding"


def test_a_diagnosis_with_holes_is_no_record() -> None:
    content = REFERENCE.model_dump(mode="json")
    content["ranks"][0]["diagnosis"]["digests"] = []
    with pytest.raises(ValueError, match="does not cover"):
        RunRecord.model_validate(content)


def _run(entrant: str, batching: str, micro_batch_size: int, noise: float, seed: int = 0, loss: float = 1.0) -> Run:
    record = _record(_trajectory(noise, seed), losses=[loss] * NUM_STEPS)
    changes = {"backend": entrant.split()[0], "batching": batching, "micro_batch_size": micro_batch_size}
    record = record.model_copy(update={"config": record.config.model_copy(update=changes)})
    (run,) = located([Run(entrant, record, RaceFacts.model_construct(purpose="diagnosis", entrant=entrant))])
    return run


def test_batches_of_another_kind_are_judged_by_a_reference_that_has_them() -> None:
    """Other kernels compute them, which may lead further away than other micro-batches do."""
    reference = [_run("single", "packed", 32, 0.0), _run("single", "packed", 16, 1e-9, seed=1)]
    padded = _run("single (padded)", "padded", 16, 1e-5, seed=2)
    own = _run("ddp (padded)", "padded", 16, 1e-5, seed=3)
    entrant = EntrantRuns("ddp (padded)", "key", "ddp", "backend", timed=[own], diagnosis=own)
    assert entrant_parity(entrant, [entrant], [*reference, padded]).verdict == "rounding"
    assert entrant_parity(entrant, [entrant], reference).verdict == "not comparable"


def test_a_reference_with_the_same_wrong_batches_hides_nothing() -> None:
    reference = [_run("single", "packed", 32, 0.0), _run("single", "packed", 16, 1e-9, seed=1)]
    padded = _run("single (padded)", "padded", 16, 1e-5, seed=2, loss=1.1)
    own = _run("ddp (padded)", "padded", 16, 1e-5, seed=3, loss=1.1)
    entrant = EntrantRuns("ddp (padded)", "key", "ddp", "backend", timed=[own], diagnosis=own)
    judged = entrant_parity(entrant, [entrant], [*reference, padded])
    assert (judged.verdict, judged.detail) == ("not comparable", "its loss of step 1 is 1.1, the reference's 1")


def _normed(num_processes: int, micro_batch_size: int, *, sync_batchnorm: bool) -> RunRecord:
    """The reference itself, if it were a run with BatchNorm."""
    options = {"num_processes": num_processes, "micro_batch_size": micro_batch_size, "sync_batchnorm": sync_batchnorm}
    config = REFERENCE.config.model_copy(update=options)
    return REFERENCE.model_copy(update={"config": config, "num_batch_norms": 4})


def test_batch_norm_is_named_as_the_reason() -> None:
    """However close the results may be: here they are the same bits."""
    alone = _normed(1, 8, sync_batchnorm=False)
    parity = normalised_otherwise(_normed(2, 4, sync_batchnorm=False), alone)
    assert parity is not None
    assert (parity.verdict, parity.cause) == ("not comparable", "BatchNorm")
    assert parity.detail == (
        "BatchNorm (4 layers) takes its statistics from 4 samples, and from 8 in the reference: those of each rank "
        "alone, where --sync-batchnorm takes them over all ranks"
    )
    assert normalised_otherwise(_normed(2, 4, sync_batchnorm=True), alone) is None
    accumulating = normalised_otherwise(_normed(2, 2, sync_batchnorm=True), alone)
    assert accumulating is not None
    assert accumulating.detail.endswith("takes its statistics from 4 samples, and from 8 in the reference")
    assert normalised_otherwise(REFERENCE, REFERENCE) is None
