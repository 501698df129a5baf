"""Throughput of a run, derived from its raw counts and seconds."""

from __future__ import annotations

from records.record import RankRecord, RunRecord

NUM_WARMUP_STEPS = 5


def samples_per_second(record: RunRecord) -> float | None:
    """Samples of all ranks over the slowest rank's training time, warm-up left out; None if nothing is left."""
    samples = sum(sum(rank.samples[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    seconds = training_seconds(record)
    return samples / seconds if seconds > 0 else None


def training_seconds(record: RunRecord) -> float:
    """Training time of the slowest rank, warm-up left out.

    Evaluation is not training time. Step times of one rank are summed before ranks are compared,
    since single steps end at different times on different ranks.
    """
    return max((sum(rank.step_seconds[NUM_WARMUP_STEPS:]) for rank in record.ranks), default=0.0)


def slowest_rank(record: RunRecord) -> RankRecord:
    """The rank whose training took longest, warm-up left out."""
    return max(record.ranks, key=lambda rank: sum(rank.step_seconds[NUM_WARMUP_STEPS:]))
