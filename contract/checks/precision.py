"""bf16 and fp16: training in these precisions, and what every rank does when a gradient overflows."""

from __future__ import annotations

import torch

from contract.case import GROWTH_INTERVAL, INIT_LOSS_SCALE
from contract.cases import (
    CLIP_FP16,
    COMPRESSED_OVERFLOW,
    GROWTH,
    HALF,
    INFINITE_GRADIENT,
    INFINITE_GRADIENT_FP16,
    INFINITE_LOSS,
    OVERFLOWS,
    UNSKIPPED,
    UNSKIPPED_FLOAT32,
)
from contract.check import Evidence, Violation, check
from contract.checks.judging import (
    ROUNDING,
    casts_model,
    config_of,
    distance,
    initial_weights,
    require_close,
    require_equal,
    require_same_bits,
    simulation_of,
)
from contract.reference import learning_rate

# Once weights differ in the last bit, some activations are rounded to another number: this is one rounding to bfloat16.
_HALF = 4e-3
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@check(
    "C28",
    HALF,
    traps="G15 G16 A5 F6 F10 F11 F13 F14",
    promises=["Backend.backward: The loss is multiplied by the loss scale", "Backend.step: The optimizer is given"],
)
def half_precision_gradients_are_the_average(evidence: Evidence) -> None:
    """In bf16 and fp16, gradients before each step are the average that is computed by hand in the same precision.

    A single process computes the same micro-batches under the same autocast and loss scale, and averages their
    gradients in float32. A comparison with training in float32 would need a tolerance that hides mistakes. In the first
    step both have the same weights, so that gradients must agree to 1e-5: a sum over ranks that is rounded to half
    precision is off by a thousandth. Later ones, and all of a model that is cast itself, need to agree to one rounding
    to bfloat16. One case does not clip, one clips in every step, and one has AdamW. With accumulation, batches are
    packed under SGD and padded under AdamW. Under bf16, the loss must not be scaled.
    """
    simulation = simulation_of(evidence)
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), len(simulation.batches), what="optimizer steps:", rank=rank)
        for step, (observed, wanted) in enumerate(zip(seen["steps"], simulation.gradients, strict=True), start=1):
            if observed["gradients"] is None or wanted is None:
                raise Violation(f"an optimizer step {step}", "the optimizer was not stepped", rank)
            scale = INIT_LOSS_SCALE if evidence.case.precision == "fp16" else 1.0
            scales = {micro_batch["scale"] for micro_batch in observed["micro_batches"]}
            require_equal(scales, {scale}, what=f"loss scales in step {step}:", rank=rank)
            tolerance = _HALF if step > 1 or casts_model(evidence) else ROUNDING
            require_close(observed["gradients"], wanted, tolerance, what=f"gradients in step {step}", rank=rank)
            norm = simulation.grad_norms[step - 1]
            if not abs(observed["grad_norm"] - norm) <= 2 * _HALF * norm:
                raise Violation(f"an unscaled norm of {norm:.6g} in step {step}", f"{observed['grad_norm']:.6g}", rank)


@check("C29", HALF, traps="F1 F12 F16", promises=["Backend.autocast: Inside, layers compute in"])
def layers_compute_in_the_precision_asked_for(evidence: Evidence) -> None:
    """A layer inside the model really computes in bf16 or fp16, in evaluations, too, and the loss is in float32.

    The check looks at the dtype of tensors inside the model, not at a setting: on a CPU, Accelerate reports fp16 and
    computes in float32.
    """
    asked = str(_DTYPES[evidence.case.precision])
    for rank, (seen,) in enumerate(evidence.ranks):
        for step in seen["steps"]:
            for micro_batch in step["micro_batches"]:
                require_equal(micro_batch["layer_dtype"], asked, what="a hidden layer in", rank=rank)
                require_equal(micro_batch["loss_dtype"], "torch.float32", what="a loss in", rank=rank)
        for dtype in seen["evaluation_dtypes"]:
            require_equal(dtype, asked, what="a hidden layer in an evaluation in", rank=rank)


@check(
    "C30",
    [*OVERFLOWS, INFINITE_LOSS, INFINITE_GRADIENT, INFINITE_GRADIENT_FP16, COMPRESSED_OVERFLOW],
    traps="F2 F9 C8 H9 A13 F3 B2",
    promises=["Backend.step: If the averaged gradient is not finite"],
)
def an_overflow_makes_all_ranks_skip(evidence: Evidence) -> None:
    """If one micro-batch of one rank overflows, every rank skips that step, reports this and keeps its weights.

    The loss is made infinite in the first micro-batch of the last rank or in the last micro-batch of the first rank. If
    each rank decided on its own gradients, the others would step to NaN. In fp32, which has no loss scale, the option
    `skip_nonfinite` asks for the same. In two cases, one of them under a loss scale, the loss is finite and a gradient
    has one infinite element, which a single rank holds if gradients are cut into parts. In another, gradients are
    finite where they are computed, and overflow when they are compressed to fp16. Two cases have packed batches, one of
    them under a loss scale.
    """
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    for rank, (seen,) in enumerate(evidence.ranks):
        skipped = [number for number, step in enumerate(seen["steps"], start=1) if step["skipped"]]
        require_equal(skipped, [overflow.step], what="skipped steps", rank=rank)
        before = seen["steps"][overflow.step - 2]["weights"]
        after = seen["steps"][overflow.step - 1]["weights"]
        require_same_bits(after, before, what="weights that the skipped step leaves unchanged", rank=rank)


@check("C31", OVERFLOWS, traps="F2 F5 F9 F11", promises=["Backend.step: The loss scale of fp16"])
def an_overflow_halves_the_scale(evidence: Evidence) -> None:
    """On every rank, the loss scale is the one asked for up to the overflow, and half of it from the next step on.

    The check measures the scale in every micro-batch, as the gradient that reaches the loss.
    """
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            expected = INIT_LOSS_SCALE / (2 if number > overflow.step else 1)
            for micro_batch in step["micro_batches"]:
                require_equal(micro_batch["scale"], expected, what=f"a loss scale in step {number} of", rank=rank)


@check(
    "C32",
    [*OVERFLOWS, INFINITE_LOSS, COMPRESSED_OVERFLOW],
    traps="R4 F5",
    promises=["interface: The learning rate of a step"],
)
def a_skipped_step_leaves_the_schedule_alone(evidence: Evidence) -> None:
    """A skipped step does not advance the learning rate, and the ranks continue in lockstep.

    The schedule counts updates, and a skipped step is not one. All ranks have the same weights after every step, and
    every step that is not skipped moves them.
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
                    raise Violation(f"a learning rate of {expected:.6g} in step {number}", f"{rate:.6g}", rank)
            require_same_bits(
                step["weights"],
                first[number - 1]["weights"],
                what=f"the weights of rank 0 after step {number}",
                rank=rank,
            )
            before = seen["steps"][number - 2]["weights"] if number > 1 else initial_weights(evidence)
            moved = distance(step["weights"], before)
            if number != overflow.step and not 0 < moved < 1:
                raise Violation(f"step {number} to move the weights", f"a relative change of {moved:g}", rank)


@check("C33", [CLIP_FP16], traps="C3 C7 F3", promises=["Backend.step: Under fp16, gradients are unscaled"])
def clipping_just_above_the_norm_is_a_no_op(evidence: Evidence) -> None:
    """Under fp16, gradients are unscaled before clipping: a threshold just above their norm changes nothing.

    The first training does not clip; the second has 1.0001 times the largest norm of the first as its threshold.
    Gradients that are still scaled would exceed it a thousandfold.
    """
    for rank, (free, clipped) in enumerate(evidence.ranks):
        for number, (one, other) in enumerate(zip(free["steps"], clipped["steps"], strict=True), start=1):
            require_close(
                other["weights"], one["weights"], ROUNDING, what=f"unclipped weights after step {number}", rank=rank
            )
            require_equal(one["skipped"] or other["skipped"], False, what="a skipped step:", rank=rank)


@check("C48", [UNSKIPPED, UNSKIPPED_FLOAT32], promises=["Backend.step: Without `options.skip_nonfinite`"])
def an_update_is_not_skipped_unasked(evidence: Evidence) -> None:
    """Without `skip_nonfinite`, every rank takes an update in fp32 and bf16 although it is not finite.

    The loss is infinite in one micro-batch, and the ranks of this group are not told to skip such a step. An adapter
    that skips it anyway hides from the loop, which may be told to end the run, that the training has gone wrong.
    """
    overflow = evidence.case.trainings[0].overflow
    assert overflow is not None
    for rank, (seen,) in enumerate(evidence.ranks):
        skipped = [number for number, step in enumerate(seen["steps"], start=1) if step["skipped"]]
        require_equal(skipped, [], what="skipped steps", rank=rank)
        weights = seen["steps"][overflow.step - 1]["weights"]
        if all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise Violation(f"weights that are not finite after step {overflow.step}", "finite weights", rank)


@check("C49", [GROWTH], traps="F15", promises=["Backend.step: The loss scale doubles"])
def the_scale_grows_again(evidence: Evidence) -> None:
    """After 2000 steps in a row without an overflow, those before a checkpoint included, the loss scale doubles.

    A training goes on from its own state, in which the number of such steps is replaced by 1998: the scale must be the
    same for two steps, and twice as large from then on. A scale that only falls lets small gradients vanish.
    """
    good_steps = evidence.case.trainings[1].good_steps
    assert good_steps is not None
    for rank, (_, resumed) in enumerate(evidence.ranks):
        scales = [{micro_batch["scale"] for micro_batch in step["micro_batches"]} for step in resumed["steps"]]
        grown = len(scales) - (GROWTH_INTERVAL - good_steps)
        expected = [{INIT_LOSS_SCALE}] * (len(scales) - grown) + [{2 * INIT_LOSS_SCALE}] * grown
        require_equal(scales, expected, what=f"loss scales after {good_steps} good steps:", rank=rank)
        require_equal(
            [step["skipped"] for step in resumed["steps"] if step["skipped"]], [], what="skipped steps", rank=rank
        )


@check("C50", HALF, traps="C3", promises=["Backend.step: The norm that every rank returns"])
def half_precision_norm_is_that_of_the_gradients(evidence: Evidence) -> None:
    """In bf16 and fp16, `step` returns the norm of the very gradients that the optimizer is given, before clipping.

    The check adds up the squares of the gradients that it has seen, in float64. They may differ from those of the
    simulation by the rounding of half precision, their norm may not. Where the threshold acts, the norm of the clipped
    gradients is the threshold, as far as torch.nn.utils.clip_grad_norm_ reaches it.
    """
    threshold = config_of(evidence).max_grad_norm
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            given = (
                sum(float(gradient.double().square().sum()) for gradient in (step["gradients"] or {}).values()) ** 0.5
            )
            norm = step["grad_norm"]
            expected = norm * min(1.0, threshold / (norm + 1e-6)) if threshold else norm
            if not abs(given - expected) <= ROUNDING * expected:
                what = f"gradients of the norm {expected:.8g} in step {number}, since `step` returned {norm:.8g}"
                raise Violation(what, f"{given:.8g}", rank)
