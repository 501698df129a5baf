"""Whether an entrant computes what the reference computes: which runs are compared, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence

from backends.registry import REFERENCE
from compare.report.grouping import EntrantRuns, unsplit
from compare.report.runs import Run
from parity.judge import (
    approximate_parity,
    diagnosed_parity,
    losses_parity,
    normalised_otherwise,
    parity_in_equal_parts,
)
from parity.verdict import Parity


def entrant_parity(entrant: EntrantRuns, group: list[EntrantRuns], completed: Sequence[Run]) -> Parity:
    """Compares an entrant with the reference.

    Args:
        entrant: The entrant.
        group: All entrants of its group.
        completed: All runs that can be used, among which the reference is sought.
    """
    if not entrant.timed:
        return Parity(verdict="unknown", detail="none of its runs completed")
    own = entrant.diagnosis or entrant.timed[0]
    candidates = _references(own, completed)
    # As it comes: a race may have a variant of it, too.
    as_it_comes = [run for run in candidates if run.entrant == REFERENCE]
    if own.record.num_batch_norms:  # what it computes depends on the samples of a micro-step
        steps = own.record.gradient_accumulation_steps
        as_it_comes.sort(key=lambda run: run.record.gradient_accumulation_steps != steps)
    reference = next(iter(as_it_comes), None)
    if reference is None and own.purpose == "timed":  # then the first run of the group is the reference
        reference = next((one.timed[0] for one in group if one.timed and not _is_compressed(one.timed[0])), None)
    otherwise = normalised_otherwise(own.record, reference.record) if reference else None
    if otherwise is not None:
        parity = otherwise
    elif _is_compressed(own):
        parity = approximate_parity(own.record, reference.record if reference else None)
    elif reference is None:
        return Parity(verdict="unknown", detail="no diagnosis run of the reference completed")
    elif own is reference:
        parity = Parity(verdict="reference", detail="the run that all others are compared with")
    else:
        parity = _exact_parity(own, reference, candidates)
    timed = [*entrant.timed, *entrant.left_out]
    ends = {run.record.ranks[0].weights_sha256 for run in timed}
    repeated = f"; its {len(timed)} timed runs end with {len(ends)} different sets of weights"
    extra = repeated if len(ends) > 1 else _same_bits(entrant, group)
    return parity.model_copy(update={"detail": parity.detail + extra})


def _exact_parity(own: Run, reference: Run, candidates: Sequence[Run]) -> Parity:
    """Compares a run that is to compute what the reference computes, in the best way that their records allow."""
    coarse = losses_parity(own.record, reference.record)
    if not (own.record.ranks[0].diagnosis and reference.record.ranks[0].diagnosis):
        return coarse
    if own.record.num_batch_norms:
        return parity_in_equal_parts(own.record, reference.record)
    # A yardstick with batches of another kind would hide that these are wrong.
    if _batching(own) != _batching(reference) and coarse.verdict == "not comparable":
        return coarse
    yardstick = _yardstick(own, reference, candidates)
    return diagnosed_parity(own.record, reference.record, yardstick.record if yardstick else None)


def sample_of(group: Sequence[EntrantRuns]) -> Run:
    """Returns a timed run of a group, to read the conditions of the group from."""
    return next(entrant.timed[0] for entrant in group if entrant.timed)


def _is_compressed(run: Run) -> bool:
    """Tells whether gradients were compressed, so that the run is an approximation; one rank has none to send."""
    return run.record.config.grad_compression != "none" and run.record.config.num_processes > 1


def _references(own: Run, completed: Sequence[Run]) -> list[Run]:
    """Returns the runs of the reference with the same purpose and task, those with the fewest micro-batches first."""
    found = [
        run
        for run in completed
        if run.record.config.backend == REFERENCE and run.purpose == own.purpose and unsplit(run) == unsplit(own)
    ]
    return sorted(found, key=lambda run: run.record.gradient_accumulation_steps)


def _yardstick(own: Run, reference: Run, candidates: Sequence[Run]) -> Run | None:
    """Returns a run of the reference with other micro-batches; None for BatchNorm, which computes something else then.

    If possible, they are of the kind and the size of those of `own`: these decide the rounding.
    """
    if reference.record.num_batch_norms:
        return None
    size = reference.record.config.micro_batch_size
    others = [run for run in candidates if run.record.config.micro_batch_size != size]
    others.sort(
        key=lambda run: (
            _batching(run) != _batching(own),
            run.record.config.micro_batch_size != own.record.config.micro_batch_size,
        )
    )
    return next(iter(others), None)


def _batching(run: Run) -> str:
    return run.record.config.batching


def _same_bits(entrant: EntrantRuns, group: list[EntrantRuns]) -> str:
    end = entrant.timed[0].record.ranks[0].weights_sha256
    others = [
        other.name
        for other in group
        if other is not entrant and any(run.record.ranks[0].weights_sha256 == end for run in other.timed)
    ]
    return f"; its timed runs end with the same bits as {', '.join(others)}" if others else ""
