"""What `setup` may do to model and optimizer, and what it must."""

from __future__ import annotations

from typing import Any

from contract.cases import PLAIN, PREPARED_OPTIMIZER
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_equal, require_same_bits


@check("C07", [PLAIN[0], PREPARED_OPTIMIZER], traps="G7 G17")
def setup_changes_nothing(evidence: Evidence) -> None:
    """`setup` changes no weight of rank 0 and no hyper-parameter, the optimizer's defaults included.

    Compared bit by bit before and after. Horovod's own broadcast of an optimizer's state takes a
    real step with zero gradients, which decays every weight once and starts Adam's counter at 1;
    recipes that multiply the learning rate by the number of ranks do it here as well.
    """
    setups = _setups(evidence)
    require_same_bits(
        setups[0]["weights_after"], setups[0]["weights_before"], what="the weights rank 0 came with", rank=0
    )
    for rank, setup in enumerate(setups):
        for before, after in zip(setup["groups_before"], setup["groups_after"], strict=False):
            require_equal(after, before, what="hyper-parameters", rank=rank)
        require_equal(len(setup["groups_after"]), len(setup["groups_before"]), what="parameter groups and defaults:")


@check("C08", [PLAIN[0], PREPARED_OPTIMIZER], traps="G13 K14")
def setup_keeps_optimizer_state(evidence: Evidence) -> None:
    """`setup` neither drops nor makes up optimizer state: momentum that was there is there afterwards.

    A wrapper that builds a new optimizer starts it empty. Handed over are a fresh optimizer and
    one that has taken a step with momentum.
    """
    for rank, setup in enumerate(_setups(evidence)):
        before, after = setup["state_before"], setup["state_after"]
        require_equal(len(after), len(before), what="parameters with optimizer state:", rank=rank)
        for one, other in zip(before, after, strict=True):
            require_same_bits(other, one, what="the optimizer state that was handed over", rank=rank)


@check("C09", [PLAIN[0]], traps="S12 S13 K7")
def setup_makes_ranks_equal(evidence: Evidence) -> None:
    """After `setup` all parameters and buffers of every rank are those of rank 0, to the last bit.

    Ranks are seeded differently on purpose. Buffers include one of integers and one that no
    state_dict contains: Apex broadcasts no buffers, Horovod only what it is given.
    """
    first = evidence.ranks[0][0]["setup"]
    if not first["buffers_after"]:
        raise Violation("a model with buffers", "none")
    for rank, seen in enumerate(evidence.ranks):
        for kind in ("weights_after", "buffers_after"):
            name = kind.split("_")[0]
            require_same_bits(seen[0]["setup"][kind], first[kind], what=f"the {name} of rank 0", rank=rank)


@check("C10", [PLAIN[0]], traps="K10")
def unwrap_gives_the_task_its_module(evidence: Evidence) -> None:
    """`unwrap` returns the very module the task built, so that names carry no prefix of a wrapper."""
    for rank, setup in enumerate(_setups(evidence)):
        require_equal(setup["is_task_module"], True, what="the object that was handed to setup:", rank=rank)


def _setups(evidence: Evidence) -> list[dict[str, Any]]:
    return [(seen[0] if isinstance(seen, list) else seen)["setup"] for seen in evidence.ranks]
