"""Where the time of a step goes: what a diagnosis run says of it, and what of that is no more than noise.

A diagnosis run takes place alone, at another time than timed runs, when the machine may be faster or slower, and takes
each step several times. Its parts are measured beside each other, though. So it says which share of a step each part
has, and timed runs say how long a step is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import truediv
from statistics import fmean, median

from compare.report.statistics import median_bounds
from compare.steps import Breakdown
from records.record import RankRecord, RunRecord
from records.throughput import NUM_WARMUP_STEPS

_ALONE = ("forward", "backward", "optimizer")
# What a rank does without the others, what of it others wait for, and what it spends because of them.
_OWN = ("data", *_ALONE)
_BEFORE_UPDATE = ("data", "forward", "backward")
_BETWEEN_RANKS = ("communication", "waiting")
# A part that takes no larger share of a step is not told from noise. A process that communicates nothing shows up to
# 2 % as communication: what a real step and a step alone find in the caches is not quite the same.
_SMALLEST_PART = 0.02


def measure_breakdown(run: RunRecord, timed: Mapping[int, float], step_seconds: float | None) -> Breakdown | None:
    """Derives the parts of a step from a diagnosis run.

    Ranks wait for each other, so that the steps of one of them alone would mislead: a part of a step is the mean over
    the ranks. Steps differ in length, and medians do not add up. Therefore the median over steps is taken of the share
    that a part has in its step, and the shares, brought to a sum of 1, divide the median step: that of timed runs where
    there are any, else that of the diagnosis run.

    Args:
        run: The record of the diagnosis run.
        timed: The seconds of the steps of timed runs under the same conditions, by the number of the step, from 1.
        step_seconds: The median step of those runs, which the report states; None without any.

    Returns:
        The parts; None if the run has too few steps.
    """
    if len(run.steps) <= NUM_WARMUP_STEPS:
        return None
    names = ("whole", "data", "first", *_ALONE)
    steps = {name: _means(name, run.ranks) for name in names}
    whole = median(steps["whole"])
    # These are differences of times, which noise alone makes larger or smaller than zero.
    differences = {
        "communication": _beyond(steps["whole"], *(steps[name] for name in _OWN)),
        "building": _beyond(steps["first"], steps["forward"], steps["backward"]),
    }
    if (waiting := _waiting(run.ranks)) is not None:
        differences["waiting"] = waiting
        if _is_resolved(waiting, whole):
            differences["communication"] = _beyond(differences["communication"], waiting)
    unresolved = {}
    for name, values in differences.items():
        if not _is_resolved(values, whole):
            unresolved[name] = max(median_bounds(values)[1], _SMALLEST_PART * whole)
    wholes, parts = steps["whole"], {name: steps[name] for name in _OWN}
    parts |= {name: differences[name] for name in _BETWEEN_RANKS if name in differences and name not in unresolved}
    shares = {name: median(map(truediv, seconds, wholes)) for name, seconds in parts.items()}
    covered = sum(shares.values())
    seconds = {name: share / covered * whole for name, share in shares.items()}
    seconds = {name: median(values) for name, values in differences.items()} | seconds
    resolved = sum(value for name, value in seconds.items() if name not in unresolved)
    as_timed = 1.0 if step_seconds is None else step_seconds / resolved
    return Breakdown(
        **{name: as_timed * value for name, value in seconds.items()},
        unresolved={name: as_timed * value for name, value in unresolved.items()},
        overhead=_overhead(run, steps["whole"], differences["building"], timed),
        covered=covered,
    )


def _is_resolved(values: Sequence[float], whole: float) -> bool:
    """Whether the median is told from noise, and from what the method itself puts into a step."""
    return median_bounds(values)[0] > _SMALLEST_PART * whole


def _waiting(ranks: Sequence[RankRecord]) -> list[float] | None:
    """Returns how long the mean rank waits in each step until the slowest has come to its update.

    The slowest of several equal ranks is so by noise, and would always have taken longer than their mean. Therefore one
    time that each rank took the step alone says which is the slowest, and another how much longer it takes.

    Returns:
        The seconds of each step after the warm-up, which noise may make negative; None for one rank, or where the step
        was not taken alone twice.
    """
    if len(ranks) == 1 or any(not rank.diagnosis or not rank.diagnosis.rehearsed_seconds for rank in ranks):
        return None
    judged = [_seconds(rank, "rehearsed") for rank in ranks]
    taken = [
        [sum(parts) for parts in zip(*(_seconds(rank, name) for name in _BEFORE_UPDATE), strict=True)] for rank in ranks
    ]
    steps = zip(zip(*judged, strict=True), zip(*taken, strict=True), strict=True)
    return [seconds[judging.index(max(judging))] - fmean(seconds) for judging, seconds in steps]


def _overhead(
    run: RunRecord, wholes: Sequence[float], building: Sequence[float], timed: Mapping[int, float]
) -> float | None:
    """Compares the same steps with each other, since batches differ in length; None if no step was timed."""
    first = len(run.steps) - len(wholes) + 1
    ratios = [
        (whole + built) / timed[step]
        for step, (whole, built) in enumerate(zip(wholes, building, strict=True), start=first)
        if step in timed
    ]
    return median(ratios) - 1 if ratios else None


def _beyond(wholes: Sequence[float], *parts: Sequence[float]) -> list[float]:
    return [whole - sum(rest) for whole, *rest in zip(wholes, *parts, strict=True)]


def _means(name: str, ranks: Sequence[RankRecord]) -> list[float]:
    """Returns the mean over ranks of what each step after the warm-up took."""
    return [fmean(seconds) for seconds in zip(*(_seconds(rank, name) for rank in ranks), strict=True)]


def _seconds(rank: RankRecord, name: str) -> list[float]:
    seen = rank.diagnosis
    assert seen is not None
    direct = {"whole": seen.whole_seconds, "data": seen.data_seconds, "first": seen.first_seconds}
    direct["rehearsed"] = seen.rehearsed_seconds
    return (direct | seen.alone_seconds)[name][max(NUM_WARMUP_STEPS, len(seen.num_reductions)) :]
