"""What profiles are made of: medians with their intervals, and what differs between processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

from scipy import special

from backends.registry import BACKENDS
from compare.report.statistics import median_bounds
from compare.results import Interval
from forecast.profile import GradientTime
from forecast.times import RankTimes
from records.config import RunOptions

_BYTES_SAVED = {"fp16": 0.5, "bf16": 0.5}
# Between the quartiles of a normal distribution, in standard deviations.
_QUARTILES = 1.349
_CONFIDENCE = 0.95


def not_in_the_model(options: RunOptions, backend_settings: Mapping[str, Any]) -> str | None:
    """Returns which option of a training the model does not know, and why; None if it knows all of them."""
    if backend_settings.get("transport") == "shared-memory":
        return "--transport shared-memory: it stays on one node"
    if backend_settings.get("embedding_gradients") == "rows":
        return "--embedding-gradients rows: how many rows a step uses is not in the model"
    if options.sync_batchnorm:
        return "--sync-batchnorm: what it sends in the forward pass is not in the model"
    if options.grad_compression == "powersgd":
        return "--grad-compression powersgd: it sends what depends on the shapes of weights, which is not in the model"
    return None


def halving_compressions(backend: str) -> list[str]:
    """Returns the compressions of a backend of the table that send gradients in half of their bytes."""
    row = BACKENDS.get(backend)
    return [name for name in row.capabilities.compressions if name in _BYTES_SAVED] if row else []


def sent_share(compression: str) -> float:
    """Returns in which share of its bytes a gradient is sent."""
    return _BYTES_SAVED.get(compression, 1.0)


def interval_of_median(values: Sequence[float]) -> Interval:
    """Returns the median with its 95 % interval, whatever the distribution."""
    low, high = median_bounds(values)
    return Interval(estimate=median(values), low=low, high=high)


class Spread(NamedTuple):
    """By how much the median steps of several starts of the same run differ.

    Attributes:
        deviation: The standard deviation of their logarithms.
        freedom: The degrees of freedom with which it is known.
    """

    deviation: float
    freedom: int


def spread_of_starts(runs: Iterable[Sequence[Sequence[float]]]) -> Spread | None:
    """Returns what several runs, each started several times, show together; None where each was started once.

    Args:
        runs: For each run, and for each of its starts, what the steps took.
    """
    squares, freedom = 0.0, 0
    for starts in runs:
        medians = [math.log(median(steps)) for steps in starts]
        mean = sum(medians) / len(medians)
        squares += sum((one - mean) ** 2 for one in medians)
        freedom += len(medians) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else None


def interval_of_run(starts: Sequence[Sequence[float]], spread: Spread | None) -> Interval:
    """Returns the median of the starts' median steps, with the 95 % interval for the median step of one more start.

    The interval is that of a prediction, with Student's t
    (https://www.itl.nist.gov/div898/handbook/pmd/section5/pmd512.htm). The variance of a median is up to pi/2 times
    that of a mean. Of a single start, it is the interval of its median step, which says nothing of other starts.
    """
    if spread is None:
        (steps,) = starts
        return interval_of_median(steps)
    estimate = median(median(steps) for steps in starts)
    quantile = float(special.stdtrit(spread.freedom, (1 + _CONFIDENCE) / 2))
    factor = math.exp(quantile * spread.deviation * math.sqrt(1 + math.pi / 2 / len(starts)))
    return Interval(estimate=estimate, low=estimate / factor, high=estimate * factor)


def ratio(over: Interval, under: Interval) -> Interval:
    """Returns by how many times the one is more than the other, at least 1: noise makes nothing faster.

    Its ends are those of both at once, so that it covers at least as often as they do.
    """
    assert None not in (over.low, over.high, under.low, under.high)
    return Interval(
        estimate=max(1.0, over.estimate / under.estimate),
        low=max(1.0, (over.low or 0.0) / (under.high or under.estimate)),
        high=max(1.0, (over.high or over.estimate) / (under.low or under.estimate)),
    )


def quartile_spread(by_rank: Sequence[Sequence[float]]) -> float:
    """Returns by how much what ranks take for the same step differs, as a standard deviation in seconds.

    Args:
        by_rank: For each rank, what each step took. What a step takes on all ranks alike does not count.
    """
    rests = []
    for seconds in zip(*by_rank, strict=True):
        mean = sum(seconds) / len(seconds)
        # A mean of n values that the deviations are taken from hides 1/n of their variance.
        scale = math.sqrt(len(seconds) / (len(seconds) - 1))
        rests += [scale * (second - mean) for second in seconds]
    rests.sort()
    quarter = len(rests) // 4
    return float(rests[-1 - quarter] - rests[quarter]) / _QUARTILES


def last_ready(ranks: Sequence[RankTimes]) -> Interval:
    """Returns the seconds from the beginning of the last backward pass until the last gradient is ready."""
    return interval_of_median([seconds for rank in ranks for seconds in rank.last_ready_of_steps])


class Parts(NamedTuple):
    """The parts of a step, in seconds; `last_backward` is the part of `backward` in the last micro-step."""

    data: float
    forward: float
    backward: float
    last_backward: float
    update: float


def parts_of(times: RankTimes, step_seconds: float) -> Parts:
    """Returns the parts of a step that takes `step_seconds`, which is about the median.

    Steps differ in length, and medians do not add up. Therefore the median over steps is taken of the share that a
    part has in its step, and the shares, brought to a sum of 1, divide the step.
    """
    steps = times.step_seconds
    measured = (times.data_seconds, times.forward_seconds, times.backward_seconds, times.update_seconds)
    shares = [median(map(truediv, seconds, steps)) for seconds in measured]
    data, forward, backward, update = (share / sum(shares) * step_seconds for share in shares)
    last_backward = backward * median(map(truediv, times.last_backward_seconds, times.backward_seconds))
    return Parts(data, forward, backward, last_backward, update)


def gradients_of(times: RankTimes, last_backward: float) -> list[GradientTime]:
    """Returns the gradients in the order of time; a parameter that some step leaves out has none.

    Args:
        times: What one rank measured.
        last_backward: The seconds of the last backward pass, of which each gradient has its median share.
    """
    found = [
        GradientTime(
            name=name,
            num_bytes=times.gradient_bytes[name],
            ready_seconds=last_backward * median(map(truediv, seconds, times.last_backward_seconds)),
        )
        for name, seconds in times.ready_seconds.items()
        if len(seconds) == len(times.last_backward_seconds)
    ]
    return sorted(found, key=lambda one: one.ready_seconds)
