"""What `setup` must do to the model and the optimizer, and what it must leave alone."""

from __future__ import annotations

from typing import Any

from contract.cases import HALF, PLAIN, PREPARED_OPTIMIZER
from contract.check import Evidence, Violation, check
from contract.checks.judging import require, require_equal, require_same_bits


@check(
    "C07",
    [PLAIN[0], PREPARED_OPTIMIZER, *HALF],
    traps="G7 G17",
    promises=["Backend.setup: No weight or buffer of rank 0 changes"],
)
def setup_changes_nothing(evidence: Evidence) -> None:
    """`setup` changes no weight or buffer of rank 0 and no hyper-parameter of the optimizer, its defaults included.

    Weights are compared bit by bit before and after. Horovod's broadcast of the state of a new optimizer takes a real
    step with zero gradients, which decays every weight once and sets Adam's step counter to 1. Recipes that multiply
    the learning rate by the number of ranks often do so here, too.
    """
    setups = _setups(evidence)
    for kind in ("weights", "buffers"):
        before, after = (setups[0][f"{kind}_{when}"] for when in ("before", "after"))
        # Where the model as a whole is cast, digits are lost that a copy of the weights keeps.
        kept = [name for name in before if evidence.case not in HALF or after[name].dtype == before[name].dtype]
        what = f"the {kind} that rank 0 had before setup"
        require_same_bits(*({name: of[name] for name in kept} for of in (after, before)), what=what, rank=0)
    for rank, setup in enumerate(setups):
        for before, after in zip(setup["groups_before"], setup["groups_after"], strict=False):
            require_equal(after, before, what="hyper-parameters", rank=rank)
        require_equal(len(setup["groups_after"]), len(setup["groups_before"]), what="parameter groups and defaults:")


@check(
    "C08", [PLAIN[0], PREPARED_OPTIMIZER], traps="G13 K14", promises=["Backend.setup: No optimizer state is dropped"]
)
def setup_keeps_optimizer_state(evidence: Evidence) -> None:
    """`setup` does not drop, change or add optimizer state.

    A wrapper that builds a new optimizer begins without state. The check passes a new optimizer to `setup`, and one
    that has taken a step with momentum.
    """
    for rank, setup in enumerate(_setups(evidence)):
        before, after = setup["state_before"], setup["state_after"]
        require_equal(len(after), len(before), what="parameters with optimizer state:", rank=rank)
        for one, other in zip(before, after, strict=True):
            require_same_bits(other, one, what="the optimizer state from before setup", rank=rank)


@check("C09", [PLAIN[0]], traps="S12 S13 K7", promises=["Backend.setup: Afterwards, all ranks have the parameters"])
def setup_makes_ranks_equal(evidence: Evidence) -> None:
    """After `setup`, all parameters and buffers of every rank have the same bits as those of rank 0.

    Ranks are seeded differently on purpose. One buffer holds integers, and one is not in the state_dict: Apex
    broadcasts no buffers, and Horovod only those that it is given.
    """
    first = evidence.ranks[0][0]["setup"]
    if not first["buffers_after"]:
        raise Violation("a model with buffers", "a model without buffers")
    for rank, seen in enumerate(evidence.ranks):
        for kind in ("weights_after", "buffers_after"):
            name = kind.split("_")[0]
            require_same_bits(seen[0]["setup"][kind], first[kind], what=f"the {name} of rank 0", rank=rank)


@check("C10", [PLAIN[0]], traps="K10", promises=["Backend.unwrap: The result is the very module"])
def unwrap_returns_the_module_of_the_task(evidence: Evidence) -> None:
    """`unwrap` returns the very module that was passed to `setup`, so that no name has the prefix of a wrapper."""
    for rank, setup in enumerate(_setups(evidence)):
        require(setup["is_task_module"], "the module that was passed to setup", "another module", rank)


def _setups(evidence: Evidence) -> list[dict[str, Any]]:
    return [(seen[0] if isinstance(seen, list) else seen)["setup"] for seen in evidence.ranks]
