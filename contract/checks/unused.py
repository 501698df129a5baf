"""Parameters that get no gradient, on all ranks or on some."""

from __future__ import annotations

import torch

from contract.cases import UNANNOUNCED, UNEVEN, UNUSED
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_same_bits


@check("C36", [UNANNOUNCED], traps="G9")
def an_unused_parameter_is_refused_by_name(evidence: Evidence) -> None:
    """Without find_unused_parameters, a parameter that gets no gradient ends the run, named, instead of hanging it.

    Backends differ in what they do with one: error in the next step, reduce zeros, wait for ever.
    """
    for rank, seen in enumerate(evidence.ranks):
        if seen["error"] is None:
            raise Violation("an error that names the parameter idle", "training went on", rank)
        if "idle" not in seen["error"]:
            raise Violation("an error that names the parameter idle", seen["error"][:200], rank)


@check("C37", [UNUSED], traps="G8")
def an_unused_parameter_stays_as_it_is(evidence: Evidence) -> None:
    """With find_unused_parameters, a parameter that no rank uses keeps its bits, under decay and momentum too.

    A single process leaves it alone because it has no gradient. A backend that reduces zeros for
    it must take them away again, or decay acts on them.
    """
    for rank, (seen,) in enumerate(evidence.ranks):
        before = {"idle": seen["setup"]["weights_after"]["idle"]}
        for number, step in enumerate(seen["steps"], start=1):
            after = {"idle": step["weights"]["idle"]}
            require_same_bits(after, before, what=f"after step {number} the unused parameter untouched", rank=rank)
            if torch.equal(step["weights"]["mixer.bias"], seen["setup"]["weights_after"]["mixer.bias"]):
                raise Violation(f"step {number} to move the other parameters", "no change", rank)


@check("C38", [UNEVEN], traps="G9 G10")
def a_parameter_used_by_one_rank_moves_on_all(evidence: Evidence) -> None:
    """A parameter that only rank 0 uses is updated alike on every rank, and no rank waits for another for ever."""
    first = evidence.ranks[0][0]
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, (one, other) in enumerate(zip(first["steps"], seen["steps"], strict=True), start=1):
            require_same_bits(
                other["weights"], one["weights"], what=f"after step {number} the weights of rank 0", rank=rank
            )
        if torch.equal(seen["steps"][-1]["weights"]["idle"], seen["setup"]["weights_after"]["idle"]):
            raise Violation("the parameter that rank 0 uses to be updated", "no change", rank)
