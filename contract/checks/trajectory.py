"""N ranks compute what one process computes: gradients, norms, weights and learning rates, step by step."""

from __future__ import annotations

from contract.cases import (
    ADAMW,
    ADAMW_CLIPPED,
    BITS,
    CLIPPED,
    FLOAT32,
    INFINITE_LOSS,
    LAYERED,
    LAYOUTS,
    MANY,
    MIXED,
    MOMENTUM,
    PLAIN,
    UNCLIPPED,
    VARIED,
    WIDE,
)
from contract.check import Evidence, Violation, check
from contract.checks.judging import (
    GRADIENT_ROUNDING,
    ROUNDING,
    TIGHT,
    bound,
    config_of,
    reference_of,
    require_close,
    require_equal,
    require_gradients,
    require_rows,
    require_same_bits,
    require_weights,
    simulation_of,
    steps_of,
)
from contract.reference import sum_of_tokens

# Adam divides by the root of a mean of squares, which enlarges differences where gradients nearly vanish.
_ADAM = 1e-9
# Of each row by itself, in which sums may cancel: by a factor of 1e10 in float64, and of 1e5 in float32.
_ROW, _ROW_IN_FLOAT32 = 1e-6, 1e-2


@check(
    "C16",
    [*PLAIN, *LAYOUTS, UNCLIPPED, WIDE, MANY, LAYERED, VARIED],
    traps="O1 O2 O4 O5 G1 G2 G3 G4 G5 G11 G14 G19 A1 A2 A3 A4 A5 A6 A7 A9 A11 F4 H6",
    promises=["Backend.backward: The gradients of several calls add up", "Backend.step: The optimizer is given"],
)
def gradients_are_those_of_one_process(evidence: Evidence) -> None:
    """Before every optimizer step, every rank holds the gradient of the mean loss over the global batch.

    Gradients must agree to 1e-12 in float64. The optimizer is plain SGD and nothing is clipped, since an adaptive
    optimizer and clipping both hide a gradient that is wrong by a factor. Shards differ tenfold in their number of
    tokens, so that a mean of means is noticed, and the last batch of an epoch has one sample. In one case
    clipping is on, with a threshold that no norm reaches. The gradients of a wider
    model fill several buckets.
    """
    require_gradients(evidence, TIGHT)


@check(
    "C17",
    [*PLAIN, *LAYOUTS, UNCLIPPED, LAYERED],
    traps="G17 H6",
    promises=["interface: N ranks compute the training", "Backend.step: Nothing but the optimizer changes weights"],
)
def weights_are_those_of_one_process(evidence: Evidence) -> None:
    """After every step of plain SGD, every rank has the weights of the single process, to 1e-12 in float64.

    The check notices a learning rate or a weight decay that is not the loop's, a frozen weight that moves, and buffers
    that change after `setup`.
    """
    require_weights(evidence, TIGHT)
    for rank, (seen,) in enumerate(evidence.ranks):
        require_same_bits(seen["buffers"], seen["setup"]["buffers_after"], what="the buffers from the start", rank=rank)


@check(
    "C18",
    [MOMENTUM, INFINITE_LOSS],
    promises=["interface: N ranks compute the training", "Backend.step: No gradient of this step is left over"],
)
def momentum_is_that_of_one_process(evidence: Evidence) -> None:
    """With momentum, too, every rank has the weights of the single process after every step, to 1e-12 in float64.

    Momentum remembers: a gradient that leaks from one step into the next changes all later steps. In one case a step is
    skipped, which momentum must survive.
    """
    require_weights(evidence, TIGHT)


@check(
    "C19",
    [*PLAIN, *LAYOUTS, *CLIPPED, UNCLIPPED, LAYERED, VARIED],
    traps="C1 C5 C6",
    promises=["Backend.step: The norm that every rank returns"],
)
def reported_norm_is_that_of_the_global_gradient(evidence: Evidence) -> None:
    """`step` returns, on every rank, the norm of the averaged gradient over all parameter groups before clipping."""
    expected, tolerance = reference_of(evidence).grad_norms, bound(evidence, TIGHT)
    for rank, step, seen in steps_of(evidence):
        norm, wanted = seen["grad_norm"], expected[step - 1]
        if not abs(norm - wanted) <= tolerance * wanted:
            raise Violation(f"a gradient norm of {wanted!r} in step {step}", repr(norm), rank)


@check("C20", CLIPPED, traps="C1 C4 C5 C6 C8", promises=["Backend.step: Clipping scales the averaged gradient"])
def clipping_acts_on_the_global_gradient(evidence: Evidence) -> None:
    """Where the norm exceeds the threshold, the optimizer is given the averaged gradient, scaled as one vector.

    Clipping before the reduction has finished, of each parameter group, in every micro-batch, or of copies that the
    optimizer does not read gives another vector. The norm exceeds the threshold in every step of the cases. One has
    batches without padding.
    """
    reference = reference_of(evidence)
    threshold = config_of(evidence).max_grad_norm
    if min(reference.grad_norms) <= threshold:
        raise Violation(f"norms above the threshold {threshold:g}", f"{min(reference.grad_norms):g} in the reference")
    require_gradients(evidence, TIGHT)


@check("C21", [ADAMW, ADAMW_CLIPPED], promises=["interface: N ranks compute the training"])
def adamw_is_that_of_one_process(evidence: Evidence) -> None:
    """With AdamW, weight decay by group, and a schedule of the learning rate, weights are those of one process.

    The schedule warms up and decays. One case has a threshold that never clips, and batches without padding, the
    other one that does. The tolerance is 1e-9, because Adam enlarges the rounding of gradients that nearly vanish. Adam
    also hides constant factors, so this check comes in addition to those with plain SGD.
    """
    require_weights(evidence, _ADAM)


@check("C22", [PLAIN[1], PLAIN[2], ADAMW], traps="G17 R1 R2 R3 R7", promises=["interface: The learning rate of a step"])
def learning_rates_follow_the_schedule(evidence: Evidence) -> None:
    """The learning rate of every step is what the schedule gives for that number of optimizer steps.

    This holds in all parameter groups, for any number of ranks and accumulation steps: a schedule that advances once
    per rank or once per micro-batch ends too early.
    """
    expected = reference_of(evidence).learning_rates
    for rank, step, seen in steps_of(evidence):
        for rate in seen["learning_rates"]:
            if not abs(rate - expected[step - 1]) <= TIGHT * abs(expected[step - 1]):
                raise Violation(f"a learning rate of {expected[step - 1]:.6g} in step {step}", f"{rate:.6g}", rank)


@check(
    "C23",
    [FLOAT32, MIXED],
    traps="O2 G14 G21",
    promises=["interface: N ranks compute the training", "Backend.step: Gradients are averaged in their own dtype"],
)
def float32_differs_by_rounding_only(evidence: Evidence) -> None:
    """In float32, weights stay within 1e-5 and gradients within 1e-4 of the float64 single process in every step.

    The last batch has one sample and a small gradient, in which rounding errors of the weights are visible.
    One model has a single weight in float32 among those in float64, which a backend may refuse in `setup`.
    """
    require_gradients(evidence, GRADIENT_ROUNDING)
    require_weights(evidence, ROUNDING)


@check(
    "C24", [BITS], world_sizes=(2,), traps="G14", promises=["Backend.step: Gradients are averaged in their own dtype"]
)
def two_ranks_average_to_the_last_bit(evidence: Evidence) -> None:
    """On two ranks in float32, weights after each of 100 AdamW steps equal, bit for bit, those of averaging by hand.

    The sum of two numbers does not depend on their order, so there is one right answer, and every backend that gives
    it equals every other. The check notices compression and a reduction in another precision. Where each rank updates a
    part of the elements, that is seen of the gradients of the first step: an optimizer may round the elements of a part
    otherwise than those of the whole, so later weights agree to 1e-5.
    """
    simulation = simulation_of(evidence)
    for rank, (seen,) in enumerate(evidence.ranks):
        is_sharded = seen["setup"]["shards_weights"] or seen["setup"]["shards_optimizer"]
        if is_sharded:
            what = "the bits of averaging the gradients of step 1 by hand"
            require_same_bits(seen["steps"][0]["gradients"] or {}, simulation.gradients[0] or {}, what=what, rank=rank)
        require_equal(len(seen["steps"]), len(simulation.batches), what="optimizer steps:", rank=rank)
        for step, (observed, weights) in enumerate(zip(seen["steps"], simulation.weights, strict=True), start=1):
            what = f"the {'weights' if is_sharded else 'bits'} of averaging by hand after step {step}"
            if is_sharded:
                require_close(observed["weights"], weights, ROUNDING, what=what, rank=rank)
            else:
                require_same_bits(observed["weights"], weights, what=what, rank=rank)


@check(
    "C45",
    [*PLAIN, WIDE, MANY, VARIED],
    traps="G20 O2",
    promises=["Backend.step: Each element is averaged"],
)
def every_row_of_a_gradient_is_right_by_itself(evidence: Evidence) -> None:
    """Each row of each gradient is right by itself, to 1e-6, whatever the size, layout or range of its tensor.

    A norm over all tensors hides a row whose gradient is a billionth of the others'. One model has a tensor of two
    million elements; another has an embedding of 1500 rows, weights that are not contiguous (one is transposed, one is
    in channels_last), and rows with gradients of very different sizes. A backend may refuse such a model in `setup`.
    """
    expected, tolerance = reference_of(evidence).gradients, bound(evidence, _ROW, _ROW_IN_FLOAT32)
    for rank, step, seen in steps_of(evidence):
        require_rows(
            seen["gradients"] or {}, expected[step - 1] or {}, tolerance, what=f"gradients in step {step}", rank=rank
        )


@check(
    "C46",
    [VARIED],
    traps="S16",
    promises=["Backend.step: Nothing but the optimizer changes weights"],
)
def buffers_are_those_of_own_forward_passes(evidence: Evidence) -> None:
    """Buffers that change in forward passes are, on each rank, those of its own forward passes, to the last bit.

    One buffer adds up the tokens that the model has seen, another is a moving average of them, as running statistics
    are. A backend that averages, sends, restores or forgets them between two reports of the loss changes what a layer
    with such buffers computes.
    """
    config = config_of(evidence)
    for rank, (seen,) in enumerate(evidence.ranks):
        total, trend = 0, 0.0
        for number, step in enumerate(seen["steps"], start=1):
            for micro_batch in step["micro_batches"]:
                tokens = sum_of_tokens(config, micro_batch["sample_ids"])
                total, trend = total + tokens, trend / 2 + tokens
            what = f"the buffers of its own forward passes after step {number}:"
            buffers = {name: step["buffers"][name].tolist() for name in ("total", "trend")}
            require_equal(buffers, {"total": total, "trend": [trend] * 3}, what=what, rank=rank)
