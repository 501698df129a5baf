"""Random streams: apart between ranks, the same again for the same (seed, rank, step)."""

from __future__ import annotations

from contract.cases import DROPOUT
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_equal, require_repeated


@check("C34", [DROPOUT], traps="S12")
def dropout_differs_between_ranks(evidence: Evidence) -> None:
    """Dropout masks differ between ranks, and between the steps and micro-steps of a rank.

    Twelve units a micro-batch are watched, at a dropout probability of one half. The same seed on
    all ranks correlates their noise; nothing else would show it.
    """
    masks = [
        [tuple(micro_batch["mask"]) for step in trainings[0]["steps"] for micro_batch in step["micro_batches"]]
        for trainings in evidence.ranks
    ]
    for rank, mask in enumerate(masks):
        if not any(any(units) for units in mask):
            raise Violation("dropout to silence units", "none", rank)
        # Twelve units coincide by chance once in 4096 pairs; seven micro-batches have 21.
        if len(set(mask)) < len(mask) - 1:
            raise Violation("another mask in every micro-batch", f"{len(set(mask))} among {len(mask)}", rank)
        for other in range(rank):
            alike = sum(one == two for one, two in zip(mask, masks[other], strict=True))
            if alike > 1:
                raise Violation(f"other masks than rank {other}", f"{alike} of {len(mask)} equal", rank)


@check("C35", [DROPOUT], traps="S1 S12 L11")
def a_run_repeats_itself(evidence: Evidence) -> None:
    """The same training run twice draws the same masks and ends with the same bits, whatever ran in between.

    From three ranks on its weights are the same to 1e-5 only: sums over ranks may then have another order.
    """
    for rank, (first, second) in enumerate(evidence.ranks):
        for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True), start=1):
            masks = [[micro_batch["mask"] for micro_batch in step["micro_batches"]] for step in (one, other)]
            require_equal(masks[1], masks[0], what=f"in step {number} the masks", rank=rank)
            what = f"after step {number} the weights of the first run"
            require_repeated(evidence, other["weights"], one["weights"], what=what, rank=rank)
