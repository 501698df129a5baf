"""Whether one backend is slower than another, by how much, and which differences the race could have detected.

Runs of one block take place within minutes of each other, so their times are compared in pairs: the logarithm of the
ratio of two times does not depend on what slows down both. The mean of these logarithms gets Student's interval
(scipy.stats.ttest_1samp); a bootstrap of five to ten pairs would be too narrow (Hesterberg 2015,
https://doi.org/10.1080/00031305.2015.1089789). If a group of equal conditions has m pairs of backends, each interval
has a confidence of 1 - 0.05 / m (Bonferroni), so that all of them together hold in 95 races of 100.

A difference is claimed if the whole interval lies beyond +-1 %, however often it is measured: link order and
environment size alone change the speed of a program by that much and more (Mytkowicz et al. 2009,
https://doi.org/10.1145/1508284.1508275).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from compare.report.words import describe_comparison
from compare.results import MIN_PAIRS, Claim, Comparison, Interval

CONFIDENCE = 0.95
SMALLEST_CLAIM = 0.01
_POWER = 0.8
# The share of turns that is left out at each end: other programs lengthen some turns many times over.
_TRIMMED = 0.1
# A race should be able to detect this difference; up to so many repeats in all are recommended for it.
TARGET = 0.05
_MAX_REPEATS = 100


def compare_pairs(
    first: str, second: str, starts: Sequence[Sequence[tuple[float, float]]], *, num_comparisons: int
) -> Comparison:
    """Compares the times of two backends, turn by turn of the same round.

    Args:
        first: The backend that is compared with.
        second: The backend that the claim is about.
        starts: For each start of the two, and for each turn of it, the time of the same work under the first and
            under the second.
        num_comparisons: The number of such comparisons in the group.
    """
    logs = [np.array([math.log(theirs / ours) for ours, theirs in pairs]) for pairs in starts]
    if len(logs) < MIN_PAIRS:
        return _too_few(first, second, len(logs))
    level = 1 - (1 - CONFIDENCE) / num_comparisons
    means = np.array([stats.trim_mean(turns, _TRIMMED) for turns in logs])
    deviation = max(float(means.std(ddof=1)), _deviation_of_a_mean(logs))
    interval = _interval(float(means.mean()), deviation / math.sqrt(len(logs)), len(logs) - 1, level)
    return _judge(first, second, interval, deviation, len(logs), level)


def _deviation_of_a_mean(logs: Sequence[np.ndarray]) -> float:
    """Returns by how much the means of starts would differ if all variance lay between the turns of a start.

    Few means may be close to each other by chance; they are never closer than this.
    """
    variances = [float(turns.var(ddof=1)) / len(turns) for turns in logs if len(turns) > 1]
    return math.sqrt(sum(variances) / len(variances)) if variances else 0.0


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the geometric mean of positive values with a 95 % interval; a single value has none."""
    logs = np.log(values)
    if len(logs) < 2:
        return Interval(estimate=values[0])
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    low, high = (
        float(logs.mean()) + sign * error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(logs) - 1)) for sign in (-1, 1)
    )
    return Interval(estimate=math.exp(float(logs.mean())), low=math.exp(low), high=math.exp(high))


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median, whatever the distribution; of fewer than six values, all of them.

    Each value is below the median with probability 1/2, which gives the ranks of the bounds among the sorted values
    (Conover 1999, Practical Nonparametric Statistics, section 3.2: scipy.stats.quantile_test).
    """
    bounds = stats.quantile_test(values, p=0.5).confidence_interval(CONFIDENCE)
    low, high = float(bounds.low), float(bounds.high)
    return (min(values) if math.isnan(low) else low, max(values) if math.isnan(high) else high)


def detectable_difference(deviation: float, num_pairs: int, level: float = CONFIDENCE) -> float:
    """Returns the smallest difference that four races of five would claim.

    It is the usual sum of two quantiles, one for the interval and one for the power
    (https://en.wikipedia.org/wiki/Power_of_a_test), and of the margin that is never claimed.

    Args:
        deviation: The standard deviation of the logarithms of single pairs.
        num_pairs: The number of pairs.
        level: The confidence of the interval.
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
    claim: Claim = "none"
    if interval.low > SMALLEST_CLAIM:
        claim = "slower"
    elif interval.high < -SMALLEST_CLAIM:
        claim = "faster"
    is_blunt = claim == "none" and detectable > TARGET
    return _described(
        Comparison(
            first=first,
            second=second,
            num_pairs=num_pairs,
            slowdown=interval,
            claim=claim,
            text="",
            detectable=detectable,
            more_repeats=_more_repeats(deviation, num_pairs, level) if is_blunt else None,
        )
    )


def _too_few(first: str, second: str, num_pairs: int) -> Comparison:
    return _described(
        Comparison(
            first=first,
            second=second,
            num_pairs=num_pairs,
            slowdown=None,
            claim="too few",
            text="",
            detectable=None,
            more_repeats=MIN_PAIRS - num_pairs,
        )
    )


def _described(comparison: Comparison) -> Comparison:
    return comparison.model_copy(update={"text": describe_comparison(comparison, target=TARGET)})


def _more_repeats(deviation: float, num_pairs: int, level: float) -> int | None:
    for number in range(num_pairs + 1, _MAX_REPEATS):
        if detectable_difference(deviation, number, level) <= TARGET:
            return number - num_pairs
    return None
