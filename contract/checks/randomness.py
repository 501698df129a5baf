"""Random numbers: different between ranks, and the same again for the same seed, rank and step."""

from __future__ import annotations

from contract.cases import DROPOUT
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_equal, require_repeated


@check("C34", [DROPOUT], traps="S12", promises=["interface: Dropout masks differ"])
def dropout_differs_between_ranks(evidence: Evidence) -> None:
    """Dropout masks differ between ranks, and between the steps and micro-batches of a rank.

    The check compares twelve units in each micro-batch, at a dropout probability of 0.5. The same seed on all ranks
    would correlate their noise, and no other check would notice.
    """
    masks = [
        [tuple(micro_batch["mask"]) for step in trainings[0]["steps"] for micro_batch in step["micro_batches"]]
        for trainings in evidence.ranks
    ]
    for rank, mask in enumerate(masks):
        if not any(any(units) for units in mask):
            raise Violation("dropout to set units to 0", "no such unit", rank)
        # Twelve units coincide by chance once in 4096 pairs; thirteen micro-batches have 78.
        if len(set(mask)) < len(mask) - 1:
            raise Violation(
                "a different mask in every micro-batch",
                f"{len(set(mask))} different masks in {len(mask)} micro-batches",
                rank,
            )
        for other in range(rank):
            alike = sum(one == two for one, two in zip(mask, masks[other], strict=True))
            if alike > 1:
                raise Violation(f"other masks than on rank {other}", f"{alike} of {len(mask)} equal masks", rank)


@check("C35", [DROPOUT], traps="S1 S12 L11", promises=["interface: A training that is repeated"])
def a_run_repeats_itself(evidence: Evidence) -> None:
    """A training that is repeated draws the same masks and ends with the same bits, whatever ran in between.

    With three ranks or more, weights need to agree to 1e-5 only, since ranks may be summed in another order.
    """
    for rank, (first, second) in enumerate(evidence.ranks):
        for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True), start=1):
            masks = [[micro_batch["mask"] for micro_batch in step["micro_batches"]] for step in (one, other)]
            require_equal(masks[1], masks[0], what=f"the masks in step {number}:", rank=rank)
            what = f"the weights of the first run after step {number}"
            require_repeated(evidence, other["weights"], one["weights"], what=what, rank=rank)
