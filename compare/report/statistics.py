"""Whether one backend is slower than another, by how much, and what would have been noticed.

Runs of one block were made within minutes of each other, so their times are compared in pairs: the
logarithm of their ratio is free of what slows down both. Its mean gets Student's interval
(scipy.stats.ttest_1samp); a bootstrap of five to ten pairs would be too narrow (Hesterberg 2015,
https://doi.org/10.1080/00031305.2015.1089789). With m pairs of backends in a group of equal conditions,
each interval covers at 1 - 0.05 / m (Bonferroni), so that all of them together cover in 95 races of 100.

A difference is claimed when the whole interval lies beyond +-1 %: link order and environment size
alone move a program's speed by that much and more (Mytkowicz et al. 2009,
https://doi.org/10.1145/1508284.1508275), however often it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from compare.results import Comparison, Interval

CONFIDENCE = 0.95
SMALLEST_CLAIM = 0.01
MIN_PAIRS = 3
_POWER = 0.8
# What a race ought to be able to see; more repeats are recommended up to this.
_TARGET = 0.05
_MOST_REPEATS = 100
_HOPELESS = 1.0


def compare_pairs(
    first: str, second: str, seconds: Sequence[tuple[float, float]], *, num_comparisons: int
) -> Comparison:
    """Compares the times of two backends, run by run of the same block.

    Args:
        first: The backend that is compared with.
        second: The backend that something is said of.
        seconds: For each block, the time of the same work under the first and under the second.
        num_comparisons: How many such comparisons are made of one group.
    """
    logs = np.array([math.log(theirs / ours) for ours, theirs in seconds])
    if len(logs) < MIN_PAIRS:
        return _too_few(first, second, len(logs))
    level = 1 - (1 - CONFIDENCE) / num_comparisons
    interval = _interval(float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs)), len(logs) - 1, level)
    return _judge(first, second, interval, float(logs.std(ddof=1)), len(logs), level)


def mean_interval(values: Sequence[float]) -> Interval:
    """The geometric mean of positive values with its own 95 % interval; none for a single one."""
    logs = np.log(values)
    if len(logs) < 2:
        return Interval(estimate=values[0])
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    low, high = (
        float(logs.mean()) + sign * error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(logs) - 1)) for sign in (-1, 1)
    )
    return Interval(estimate=math.exp(float(logs.mean())), low=math.exp(low), high=math.exp(high))


def detectable_difference(deviation: float, num_pairs: int, level: float = CONFIDENCE) -> float:
    """The smallest difference that four races of five would claim, from the spread of single pairs.

    The usual sum of two quantiles: one for the interval, one for the power
    (https://en.wikipedia.org/wiki/Power_of_a_test), and the margin that is never claimed.
    """
    freedom = num_pairs - 1
    quantiles = stats.t.ppf(0.5 + level / 2, freedom) + stats.t.ppf(_POWER, freedom)
    return math.expm1(float(quantiles) * deviation / math.sqrt(num_pairs)) + SMALLEST_CLAIM


def _interval(mean: float, standard_error: float, freedom: int, level: float) -> Interval:
    if standard_error == 0:
        low = high = mean
    else:
        low, high = stats.t.interval(level, freedom, loc=mean, scale=standard_error)
    return Interval(estimate=math.expm1(mean), low=math.expm1(low), high=math.expm1(high))


def _judge(first: str, second: str, interval: Interval, deviation: float, num_pairs: int, level: float) -> Comparison:
    assert interval.low is not None
    assert interval.high is not None
    detectable = detectable_difference(deviation, num_pairs, level)
    bounds = f"[{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    more = None
    if interval.low > SMALLEST_CLAIM:
        claim, text = "slower", f"{second} is {100 * interval.estimate:.1f} % slower than {first} {bounds}"
    elif interval.high < -SMALLEST_CLAIM:
        # In the words of the first, so that every claim says slower: a tenth more and a tenth less are not the same.
        turned = [100 * math.expm1(-math.log1p(x)) for x in (interval.estimate, interval.high, interval.low)]
        claim = "faster"
        text = f"{first} is {turned[0]:.1f} % slower than {second} [{turned[1]:.1f}, {turned[2]:.1f}]"
    else:
        claim = "none"
        seen = f"would have seen {100 * detectable:.1f} %" if detectable < _HOPELESS else "far too noisy to see any"
        text = f"no difference shown between {first} and {second} ({seen})"
        if detectable > _TARGET:
            more = _more_repeats(deviation, num_pairs, level)
            text += (
                f"; {more} more repeats would show {100 * _TARGET:.0f} %" if more else "; a quieter machine is needed"
            )
    return Comparison(
        first=first,
        second=second,
        num_pairs=num_pairs,
        slowdown=interval,
        claim=claim,  # type: ignore[arg-type]
        text=text,
        detectable=detectable,
        more_repeats=more,
    )


def _too_few(first: str, second: str, num_pairs: int) -> Comparison:
    missing = MIN_PAIRS - num_pairs
    return Comparison(
        first=first,
        second=second,
        num_pairs=num_pairs,
        slowdown=None,
        claim="too few",
        text=f"nothing can be said of {first} and {second} yet: {num_pairs} pair(s) of runs, {missing} more needed",
        detectable=None,
        more_repeats=missing,
    )


def _more_repeats(deviation: float, num_pairs: int, level: float) -> int | None:
    for number in range(num_pairs + 1, _MOST_REPEATS):
        if detectable_difference(deviation, number, level) <= _TARGET:
            return number - num_pairs
    return None
