"""bf16 and fp16: the same training in that precision, and agreement over every overflow."""

from __future__ import annotations

import torch

from contract.cases import CLIP_FP16, HALF, INFINITE_LOSS, INIT_LOSS_SCALE, OVERFLOWS
from contract.check import Evidence, Violation, check
from contract.checks.judging import (
    ROUNDING,
    config_of,
    distance,
    initial_weights,
    require_close,
    require_equal,
    require_same_bits,
    simulation_of,
)
from contract.reference import learning_rate

# Ranks compute the very micro-batches of the simulation, mostly to the last bit; this is one rounding
# to bfloat16.
_HALF = 4e-3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@check("C28", HALF, traps="G15 G16 A5 F6 F10 F11 F13 F14")
def half_precision_gradients_are_the_average(evidence: Evidence) -> None:
    """In bf16 and fp16, gradients before each step are the average of those computed by hand in the same precision.

    A single process computes the same micro-batches under the same autocast and loss scale, and
    averages in float32. Comparing with float32 would need a tolerance that hides mistakes. Without
    clipping and with a threshold that acts in every step. Under bf16 the loss is not scaled.
    """
    simulation = simulation_of(evidence)
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), len(simulation.batches), what="optimizer steps:", rank=rank)
        for step, (observed, wanted) in enumerate(zip(seen["steps"], simulation.gradients, strict=True), start=1):
            if observed["gradients"] is None or wanted is None:
                raise Violation(f"an optimizer step {step}", "the optimizer was not stepped", rank)
            scale = INIT_LOSS_SCALE if evidence.case.precision == "fp16" else 1.0
            scales = {micro_batch["scale"] for micro_batch in observed["micro_batches"]}
            require_equal(scales, {scale}, what=f"in step {step} loss scales", rank=rank)
            require_close(observed["gradients"], wanted, _HALF, what=f"in step {step} gradients", rank=rank)
            norm = simulation.grad_norms[step - 1]
            if not abs(observed["grad_norm"] - norm) <= 2 * _HALF * norm:
                raise Violation(f"in step {step} an unscaled norm of {norm:.6g}", f"{observed['grad_norm']:.6g}", rank)


@check("C29", HALF, traps="F1 F12")
def layers_compute_in_the_precision_asked_for(evidence: Evidence) -> None:
    """Inside the model a layer really computes in bf16 or fp16, and the loss in float32.

    The dtype is that of a tensor seen on its way, not that of a setting: Accelerate on CPU reports
    fp16 and computes in float32.
    """
    asked = str(_DTYPES[evidence.case.precision])
    for rank, (seen,) in enumerate(evidence.ranks):
        for step in seen["steps"]:
            for micro_batch in step["micro_batches"]:
                require_equal(micro_batch["layer_dtype"], asked, what="a hidden layer in", rank=rank)
                require_equal(micro_batch["loss_dtype"], "torch.float32", what="a loss in", rank=rank)


@check("C30", [*OVERFLOWS, INFINITE_LOSS], traps="F2 F9 C8 H9 A13 F3")
def an_overflow_makes_all_ranks_skip(evidence: Evidence) -> None:
    """When one micro-batch of one rank overflows, every rank skips that step, says so, and keeps its weights.

    The fault is an infinite loss in the first or in the last micro-batch, on the last or on the
    first rank. A decision taken by each rank on its own gradients lets the others step to NaN.
    Without a loss scale the same is asked of an adapter by the option `skip_nonfinite`.
    """
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    for rank, (seen,) in enumerate(evidence.ranks):
        skipped = [number for number, step in enumerate(seen["steps"], start=1) if step["skipped"]]
        require_equal(skipped, [overflow.step], what="the steps skipped to be", rank=rank)
        before = seen["steps"][overflow.step - 2]["weights"]
        after = seen["steps"][overflow.step - 1]["weights"]
        require_same_bits(after, before, what="weights untouched by the skipped step", rank=rank)


@check("C31", OVERFLOWS, traps="F2 F5 F9 F11")
def an_overflow_halves_the_scale(evidence: Evidence) -> None:
    """The loss scale is the one asked for until the overflow and half of it from the next step on, on every rank.

    It is read off the gradient that reaches the loss, in every micro-batch.
    """
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            expected = INIT_LOSS_SCALE / (2 if number > overflow.step else 1)
            for micro_batch in step["micro_batches"]:
                require_equal(micro_batch["scale"], expected, what=f"in step {number} a loss scale of", rank=rank)


@check("C32", [*OVERFLOWS, INFINITE_LOSS], traps="R4 F5")
def a_skipped_step_leaves_the_schedule_alone(evidence: Evidence) -> None:
    """The learning rate after a skipped step is the same again, and the training goes on in lockstep.

    The rates count updates, not attempts; all ranks have the same weights after every step, and
    these move in every step that was not skipped.
    """
    config = config_of(evidence)
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    first = evidence.ranks[0][0]["steps"]
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            expected = learning_rate(config, number - 1 - (number > overflow.step), len(seen["steps"]))
            for rate in step["learning_rates"]:
                if not abs(rate - expected) <= 1e-12:
                    raise Violation(f"in step {number} a learning rate of {expected:.6g}", f"{rate:.6g}", rank)
            require_same_bits(
                step["weights"],
                first[number - 1]["weights"],
                what=f"after step {number} the weights of rank 0",
                rank=rank,
            )
            before = seen["steps"][number - 2]["weights"] if number > 1 else initial_weights(evidence)
            moved = distance(step["weights"], before)
            if number != overflow.step and not 0 < moved < 1:
                raise Violation(f"step {number} to move the weights", f"a relative change of {moved:g}", rank)


@check("C33", [CLIP_FP16], traps="C3 C7 F3")
def clipping_just_above_the_norm_is_a_no_op(evidence: Evidence) -> None:
    """Under fp16 a threshold slightly above the norm changes nothing: gradients are unscaled before they are clipped.

    The largest norm of an unclipped training times 1.0001 is the threshold of a second one. Clipped
    while still scaled, its gradients would be a thousand times too large for it.
    """
    for rank, (free, clipped) in enumerate(evidence.ranks):
        for number, (one, other) in enumerate(zip(free["steps"], clipped["steps"], strict=True), start=1):
            require_close(
                other["weights"], one["weights"], ROUNDING, what=f"after step {number} unclipped weights", rank=rank
            )
            require_equal(one["skipped"] or other["skipped"], False, what="a skipped step:", rank=rank)
