"""N processes compute what one computes: gradients, norms, weights and learning rates, step by step."""

from __future__ import annotations

from contract.cases import ADAMW, ADAMW_CLIPPED, BITS, CLIPPED, FLOAT32, MOMENTUM, PLAIN, WIDE
from contract.check import Evidence, Violation, check
from contract.checks.judging import (
    ROUNDING,
    TIGHT,
    config_of,
    reference_of,
    require_equal,
    require_gradients,
    require_same_bits,
    require_weights,
    simulation_of,
    steps_of,
)

# Adam divides by the root of a sum of squares: where gradients nearly vanish it enlarges differences.
_ADAM = 1e-9


@check("C16", [*PLAIN, WIDE], traps="O1 O2 O4 O5 G1 G2 G3 G4 G5 G11 G14 G19 A1 A2 A3 A4 A5 A6 A7 A9 A11 F4 H6")
def gradients_are_those_of_one_process(evidence: Evidence) -> None:
    """Before every optimizer step, every rank holds the gradient of the mean loss over the global batch.

    In float64 to 1e-12, with plain SGD and no clipping, since an adaptive optimizer and clipping
    both hide a gradient that is wrong by a factor. Shards differ tenfold in tokens, so that a mean
    of means shows; the last batch of an epoch has one sample. A wider model fills several buckets.
    """
    require_gradients(evidence, TIGHT)


@check("C17", PLAIN, traps="G17 H6")
def weights_are_those_of_one_process(evidence: Evidence) -> None:
    """After every plain SGD step, every rank has the weights of the single process, in float64 to 1e-12.

    The right gradient with another learning rate or decay than the loop's shows here, a frozen weight
    that moves, and buffers that are no longer those the training began with.
    """
    require_weights(evidence, TIGHT)
    for rank, (seen,) in enumerate(evidence.ranks):
        require_same_bits(seen["buffers"], seen["setup"]["buffers_after"], what="the buffers of the start", rank=rank)


@check("C18", [MOMENTUM])
def momentum_is_that_of_one_process(evidence: Evidence) -> None:
    """With momentum, too, weights are those of the single process after every step, in float64 to 1e-12.

    Momentum remembers: a gradient that leaks from one window into the next moves all later steps.
    """
    require_weights(evidence, TIGHT)


@check("C19", [*PLAIN, *CLIPPED], traps="C1 C5 C6")
def reported_norm_is_that_of_the_global_gradient(evidence: Evidence) -> None:
    """`step` returns on every rank the norm of the averaged gradient over all parameter groups, before clipping."""
    expected = reference_of(evidence).grad_norms
    for rank, step, seen in steps_of(evidence):
        norm, wanted = seen["grad_norm"], expected[step - 1]
        if not abs(norm - wanted) <= TIGHT * wanted:
            raise Violation(f"in step {step} a gradient norm of {wanted!r}", repr(norm), rank)


@check("C20", CLIPPED, traps="C1 C4 C5 C6 C8")
def clipping_acts_on_the_global_gradient(evidence: Evidence) -> None:
    """With an active threshold, the optimizer is given the averaged gradient, scaled as one vector to that norm.

    Clipping before the reduction has finished, group by group, on every micro-batch, or on copies
    that the optimizer does not read gives another vector. The threshold is active in every step.
    """
    reference = reference_of(evidence)
    threshold = config_of(evidence).max_grad_norm
    if min(reference.grad_norms) <= threshold:
        raise Violation(f"norms above the threshold {threshold:g}", f"{min(reference.grad_norms):g} in the reference")
    require_gradients(evidence, TIGHT)


@check("C21", [ADAMW, ADAMW_CLIPPED])
def adamw_is_that_of_one_process(evidence: Evidence) -> None:
    """With AdamW, decay groups, warm-up and decay of the learning rate, weights are those of one process.

    Once under a threshold that never acts and once under one that does. The tolerance is 1e-9:
    Adam enlarges the rounding of gradients that nearly vanish. It also hides constant factors,
    so this comes in addition to plain SGD.
    """
    require_weights(evidence, _ADAM)


@check("C22", [PLAIN[1], PLAIN[2], ADAMW], traps="G17 R1 R2 R3 R7")
def learning_rates_are_the_schedule(evidence: Evidence) -> None:
    """The learning rate of every step is what the schedule says for that many optimizer steps.

    In all parameter groups and at any world size and accumulation: a schedule that advances once a
    rank or once a micro-batch ends too early.
    """
    expected = reference_of(evidence).learning_rates
    for rank, step, seen in steps_of(evidence):
        for rate in seen["learning_rates"]:
            if not abs(rate - expected[step - 1]) <= TIGHT * abs(expected[step - 1]):
                raise Violation(f"in step {step} a learning rate of {expected[step - 1]:.6g}", f"{rate:.6g}", rank)


@check("C23", [FLOAT32], traps="O2 G14")
def float32_differs_by_rounding_only(evidence: Evidence) -> None:
    """In float32 weights stay within 1e-5 of the float64 single process, and gradients within 1e-4, step by step.

    The gradient of a last batch of one sample is small, and the rounding of the weights shows in it.
    """
    require_gradients(evidence, 10 * ROUNDING)
    require_weights(evidence, ROUNDING)


@check("C24", [BITS], world_sizes=(2,), traps="G14")
def two_ranks_average_to_the_last_bit(evidence: Evidence) -> None:
    """On two ranks in float32, weights after 20 AdamW steps are, bit for bit, those of averaging by hand.

    The sum of two numbers does not depend on their order, so there is one right answer, and every
    backend that gives it equals every other. Compression, or reducing in another precision, shows.
    """
    simulation = simulation_of(evidence)
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), len(simulation.batches), what="optimizer steps:", rank=rank)
        for step, (observed, weights) in enumerate(zip(seen["steps"], simulation.weights, strict=True), start=1):
            require_same_bits(
                observed["weights"], weights, what=f"after step {step} the bits of averaging by hand", rank=rank
            )
