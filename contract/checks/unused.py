"""Parameters that get no gradient, on all ranks or on some of them."""

from __future__ import annotations

from contract.cases import RARE, UNANNOUNCED, UNUSED
from contract.check import Evidence, Violation, check
from contract.checks.judging import TIGHT, require_gradients, require_same_bits, require_weights


@check("C36", UNANNOUNCED, traps="G9", promises=["interface: Unless `find_unused_parameters` is set"])
def an_unused_parameter_is_refused_by_name(evidence: Evidence) -> None:
    """Without `find_unused_parameters`, a parameter without a gradient ends the training with an error that names it.

    Left to themselves, backends differ: one raises an error in the next step, another reduces zeros, a third waits for
    ever. One case never uses the parameter, the other uses it in the first step only.
    """
    for rank, seen in enumerate(evidence.ranks):
        if seen["error"] is None:
            raise Violation("an error that names the parameter idle", "no error", rank)
        if "idle" not in seen["error"]:
            raise Violation("an error that names the parameter idle", seen["error"][:200], rank)


@check("C37", [UNUSED], traps="G8", promises=["Backend.step: With `options.find_unused_parameters`"])
def an_unused_parameter_stays_as_it_is(evidence: Evidence) -> None:
    """With `find_unused_parameters`, a parameter that no rank uses keeps its bits, despite weight decay and momentum.

    A single process leaves it alone because it has no gradient. A backend that reduces zeros for it must remove them
    again, or weight decay acts on the parameter. All other parameters move as they do in the single process. Batches
    are packed.
    """
    for rank, (seen,) in enumerate(evidence.ranks):
        before = {"idle": seen["setup"]["weights_after"]["idle"]}
        for number, step in enumerate(seen["steps"], start=1):
            after = {"idle": step["weights"]["idle"]}
            require_same_bits(after, before, what=f"the unused parameter unchanged after step {number}", rank=rank)
    require_gradients(evidence, TIGHT)
    require_weights(evidence, TIGHT)


@check("C38", [RARE], traps="G9", promises=["Backend.step: With `options.find_unused_parameters`"])
def a_rarely_used_parameter_moves_on_all(evidence: Evidence) -> None:
    """A parameter that few samples use is averaged over all ranks, whether they use it or not, and no rank hangs.

    It gets a gradient in some steps, micro-batches and ranks only. Its gradients and weights must be those of the
    single process, which leaves it alone in all other steps.
    """
    require_gradients(evidence, TIGHT)
    require_weights(evidence, TIGHT)
    used = [step["gradients"] is not None and "idle" in step["gradients"] for step in evidence.ranks[0][0]["steps"]]
    if all(used) or not any(used):
        raise Violation("a parameter that some steps use and some do not", f"used in {sum(used)} of {len(used)}")
