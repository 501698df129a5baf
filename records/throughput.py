"""Throughput of a run, derived from its raw counts and seconds."""

from __future__ import annotations

from records.record import RankRecord, RunRecord

NUM_WARMUP_STEPS = 5


def samples_per_second(record: RunRecord) -> float | None:
    """Returns the samples of all ranks, divided by the training time of the slowest rank, in samples per second.

    Warm-up steps are left out; the result is None if no step is left.
    """
    samples = sum(sum(rank.samples[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    seconds = training_seconds(record)
    return samples / seconds if seconds > 0 else None


def training_seconds(record: RunRecord) -> float:
    """Returns the training time of the slowest rank in seconds, without warm-up steps.

    Evaluation is not training time. Step times of one rank are summed before ranks are compared,
    since single steps end at different times on different ranks.
    """
    return max((sum(rank.step_seconds[NUM_WARMUP_STEPS:]) for rank in record.ranks), default=0.0)


def slowest_rank(record: RunRecord) -> RankRecord:
    """Returns the rank whose training took longest, without warm-up steps."""
    return max(record.ranks, key=lambda rank: sum(rank.step_seconds[NUM_WARMUP_STEPS:]))
