"""Whether one backend is slower than another, by how much, and which differences the race could have detected.

Entrants take turns on the same steps, so their times are compared in pairs: the logarithm of the ratio of two times
does not depend on what slows down both. A turn has one value, and a start has their mean. Other programs lengthen
single steps many times over, so both means are trimmed by a fifth at each end, as Wilcox (2017, Introduction to Robust
Estimation and Hypothesis Testing) recommends: that of three or four steps by the longest and the shortest, and that of
a start with the variance that Yuen (1974, https://doi.org/10.1093/biomet/61.1.165) gives it. Were steps and turns
normal, whose mean would be the best, each trimming would cost a fifth to a third of the time. They are not: in five
races with turns of four steps, the starts of a pair differ by 0.6 to 0.75 times as much as without the first trimming,
for which a race would need twice the time; in forty races of three entrants, the error of a start's mean is 0.77 times
(on two cores of an Intel Xeon) and 0.66 times (of an AMD EPYC) what it is without the second. What an entrant loses to
long steps of its own is said apart (compare/report/long_steps.py).

Turns differ within a start and between starts (Kalibera and Jones 2013, https://doi.org/10.1145/2464157.2464160). Let
a pair of backends have S starts whose means have the variance B, of which V is expected from the spread of the turns
alone. Few starts estimate B badly, so the share of starting, B - V, is estimated from all pairs of the group together,
each with the weight that its precision deserves: 1 / (share + V)^2 (DerSimonian and Laird 1986 estimate the share of
studies likewise, https://doi.org/10.1016/0197-2456(86)90046-2). The variance of the mean is (V + max(0, share)) / S,
and Student's interval has the degrees of freedom of Satterthwaite (1946, https://doi.org/10.2307/3002019), at least 1.
A pair whose B is clearly more than share + V explain, by a chi-squared test at 5 %, has Student's interval of its own
starts, since the share of the others would say too little of it.
Where starts have a single value, as runs outside a race, the interval is that of scipy.stats.ttest_1samp. In
simulations of three to eight entrants, some of them thirty times as noisy as others, all intervals of a race held in 91
to 100 races of 100, and in 97 on average, whatever the share of starting.

If a group of equal conditions has m pairs of backends, each interval has a confidence of 1 - 0.05 / m (Bonferroni), so
that all of them together hold in 95 races of 100. Where one of several opponents was chosen because it is the fastest,
the pairs with all of them count, since each could have been compared.

A difference is claimed if the whole interval lies beyond +-0.5 %, however often it is measured. Link order and
environment size alone change the speed of a program by more than that (Mytkowicz et al. 2009,
https://doi.org/10.1145/1508284.1508275), so smaller differences say nothing of a library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from compare.report.words import describe_comparison
from compare.results import MIN_PAIRS, SETTLED_STARTS, SMALLEST_CLAIM, TARGET, Claim, Comparison, Interval, Spread

CONFIDENCE = 0.95
_POWER = 0.8
# The share that is left out at each end, of the steps of a turn and of the turns of a start.
_TRIMMED = 0.2
# A pair is judged by its own starts alone if so few pairs would differ so much by chance. Of six pairs, one with starts
# that differ three times as much, all intervals hold in 92 to 94 races of 100 without this, and in 94 to 96 with it. At
# 20 % it would be 96, but races of 4 minutes would find a planted 2 % in 36 of 40 instead of in all.
_SELDOM = 0.05
# Bounds that a few noisy turns leave open are not followed further than this.
_MAX_RATIO = 1e6
# The weights of pairs depend on the share of starting, which depends on them; more passes change neither.
_PASSES = 3
# Up to so many repeats in all are recommended in order to detect `TARGET`.
_MAX_REPEATS = 100


class PairedStarts(NamedTuple):
    """Two backends that were started together several times.

    Attributes:
        first: The backend that is compared with.
        second: The backend that the claim is about.
        starts: For each start, the logarithms of the ratios of their times, second to first, of each turn.
    """

    first: str
    second: str
    starts: Sequence[Sequence[float]]


class _Error(NamedTuple):
    """How well the mean of a pair is known: the standard error of its logarithm, and its degrees of freedom."""

    standard: float
    freedom: float


class _Share(NamedTuple):
    """What starting adds to the variance of the mean of a start.

    Attributes:
        variance: That.
        between: The variance of the means of starts, as the weighted mean over all pairs.
        within: The part of it that is expected from turns, likewise.
        freedom: The degrees of freedom of `between`.
    """

    variance: float
    between: float
    within: float
    freedom: float


def log_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the logarithm of the ratio of the times of a turn.

    Args:
        first: The seconds of each step under the backend that is compared with.
        second: The seconds of the same steps under the other.
    """
    ratios = np.log(np.divide(second, first))
    return _trimmed_mean(ratios, 0 if len(ratios) < 3 else max(1, _num_trimmed(ratios)))


def compare_group(pairs: Sequence[PairedStarts], num_opponents: int = 1) -> list[Comparison]:
    """Compares the times of pairs of backends of a group of equal conditions.

    Args:
        pairs: All pairs, or those of one opponent.
        num_opponents: From how many the opponent was chosen by these very times.
    """
    level = 1 - (1 - CONFIDENCE) / max(1, num_opponents * len(pairs))
    numbers = [number for number, pair in enumerate(pairs) if len(pair.starts) >= MIN_PAIRS]
    enough = [pairs[number] for number in numbers]
    within = [_variance_from_turns(pair) for pair in enough]
    share = _share_of_starting(enough, within)
    comparisons = {}
    for number, pair, own in zip(numbers, enough, within, strict=True):
        spread = None
        if share is None or _differs_more(pair, own, share):
            error = _Error(_standard_error_of_means(pair), len(pair.starts) - 1)
            starting = max(0.0, _variance_of_means(pair) - own)
        else:
            error, starting = _error(pair, own, share), share.variance
        if share is not None:
            spread = Spread(turns=math.sqrt(own), starting=math.sqrt(starting))
        comparisons[number] = _judge(pair, error, level, spread)
    return [
        comparisons.get(number) or _too_few(pair.first, pair.second, len(pair.starts))
        for number, pair in enumerate(pairs)
    ]


def _means(pair: PairedStarts) -> list[float]:
    """Returns the trimmed mean of each start."""
    return [_trimmed_mean(turns, _num_trimmed(turns)) for turns in pair.starts]


def _num_trimmed(values: Sequence[float] | NDArray[np.float64]) -> int:
    """Returns how many values are left out at each end, as scipy.stats.trim_mean does."""
    return int(_TRIMMED * len(values))


def _trimmed_mean(values: Sequence[float] | NDArray[np.float64], trimmed: int) -> float:
    """Returns the mean without the `trimmed` smallest and largest values, 40 times as fast as scipy.stats.trim_mean."""
    return float(np.sort(values)[trimmed : len(values) - trimmed].mean())


def _variance_of_means(pair: PairedStarts) -> float:
    return float(np.var(_means(pair), ddof=1))


def _variance_from_turns(pair: PairedStarts) -> float:
    """Returns the variance that the means of starts have because of their turns; 0 where no start has several."""
    variances = [_variance_of_trimmed_mean(turns) for turns in pair.starts if len(turns) > 1]
    return sum(variances) / len(variances) if variances else 0.0


def _variance_of_trimmed_mean(turns: Sequence[float]) -> float:
    """Returns Yuen's estimate, as in scipy.stats.ttest_ind with `trim`: those left out have the next value."""
    trimmed, in_order = _num_trimmed(turns), np.sort(turns)
    winsorized = np.clip(in_order, in_order[trimmed], in_order[-1 - trimmed])
    left = len(turns) - 2 * trimmed
    return float(np.var(winsorized, ddof=1)) * (len(turns) - 1) / (left * (left - 1))


def _standard_error_of_means(pair: PairedStarts) -> float:
    return math.sqrt(_variance_of_means(pair) / len(pair.starts))


def _share_of_starting(pairs: Sequence[PairedStarts], within: Sequence[float]) -> _Share | None:
    """Returns what starting adds to the variance of the mean of a start; None where some start has a single value.

    Args:
        pairs: All pairs of the group.
        within: For each of them, the variance that the means of its starts have because of their turns.
    """
    if not pairs or min(within) == 0:
        return None
    between = np.array([_variance_of_means(pair) for pair in pairs])
    turns = np.array(within)
    variance = 0.0
    for _ in range(_PASSES):
        weights = (variance + turns) ** -2.0
        weights /= weights.sum()
        variance = max(0.0, float(weights @ (between - turns)))
    # So many pairs are there among so many entrants, of which one is the measure of the others.
    num_pairs = 1 / float(weights @ weights)
    num_entrants = (1 + math.sqrt(1 + 8 * num_pairs)) / 2
    free = (min(len(pair.starts) for pair in pairs) - 1) * (num_entrants - 1)
    return _Share(variance, float(weights @ between), float(weights @ turns), free)


def _differs_more(pair: PairedStarts, own: float, share: _Share) -> bool:
    """Returns whether the starts of a pair differ more than those of the group, by a test of their variance.

    Args:
        pair: The pair.
        own: The variance that the means of its starts have because of their turns.
        share: What starting adds to it in the group.
    """
    free = len(pair.starts) - 1
    most = float(special.chdtri(free, _SELDOM)) / free * (share.variance + own)
    return _variance_of_means(pair) > most


def _error(pair: PairedStarts, own: float, share: _Share) -> _Error:
    """Returns how well the mean of a pair is known.

    Args:
        pair: The pair.
        own: The variance that the means of its starts have because of their turns.
        share: What starting adds to it.
    """
    num_starts = len(pair.starts)
    free_within = sum(len(turns) - 2 * _num_trimmed(turns) - 1 for turns in pair.starts)
    variance = share.variance + own
    if share.variance == 0:
        freedom = float(free_within)
    else:
        freedom = variance**2 / (share.between**2 / share.freedom + (own - share.within) ** 2 / free_within)
    return _Error(math.sqrt(variance / num_starts), max(1.0, freedom))


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the geometric mean of positive values with a 95 % interval; a single value has none."""
    logs = np.log(values)
    if len(logs) < 2:
        return Interval(estimate=values[0])
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    low, high = (float(logs.mean()) + sign * error * _quantile(0.5 + CONFIDENCE / 2, len(logs) - 1) for sign in (-1, 1))
    return Interval(estimate=math.exp(float(logs.mean())), low=math.exp(low), high=math.exp(high))


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median, whatever the distribution; of fewer than six values, all of them.

    Each value is below the median with probability 1/2, which gives the ranks of the bounds among the sorted values
    (Conover 1999, Practical Nonparametric Statistics, section 3.2: scipy.stats.quantile_test).
    """
    from scipy import stats  # which takes longer to import than all of this program

    bounds = stats.quantile_test(values, p=0.5).confidence_interval(CONFIDENCE)
    low, high = float(bounds.low), float(bounds.high)
    return (min(values) if math.isnan(low) else low, max(values) if math.isnan(high) else high)


def detectable_difference(
    standard_error: float, freedom: float, level: float = CONFIDENCE, margin: float = SMALLEST_CLAIM
) -> float:
    """Returns the smallest difference that four races of five would claim.

    It is the usual sum of two quantiles, one for the interval and one for the power
    (https://en.wikipedia.org/wiki/Power_of_a_test), and of the margin that is never claimed.

    Args:
        standard_error: The standard error of the logarithm.
        freedom: Its degrees of freedom.
        level: The confidence of the interval.
        margin: The difference that the whole interval has to exceed.
    """
    quantiles = _quantile(0.5 + level / 2, freedom) + _quantile(_POWER, freedom)
    return _ratio(quantiles * standard_error) + margin


def detectable_later(detectable: float, longer: float, *, spread: Spread | None = None, num_starts: int = 1) -> float:
    """Returns about the smallest difference that a longer race would claim.

    What turns contribute to the variance shrinks with the time. What starting contributes shrinks with the number of
    starts, and a race has longer starts rather than more than `SETTLED_STARTS` of them.

    Args:
        detectable: The smallest difference that this race would claim.
        longer: How many times as long the other race is.
        spread: Why starts differ; None to say that it is because of their turns.
        num_starts: The number of starts of this race.
    """
    shrinks = 1 / longer
    if spread is not None and (variance := spread.starting**2 + spread.turns**2):
        starts = min(longer * num_starts, max(num_starts, SETTLED_STARTS))
        shrinks = (spread.starting**2 * num_starts / starts + spread.turns**2 / longer) / variance
    return SMALLEST_CLAIM + (detectable - SMALLEST_CLAIM) * math.sqrt(shrinks)


def _ratio(logarithm: float) -> float:
    """Returns by how much a time is longer, as a share; beyond a factor of `_MAX_RATIO`, that factor."""
    limit = math.log(_MAX_RATIO)
    return math.expm1(min(max(logarithm, -limit), limit))


def _interval(mean: float, error: _Error, level: float) -> tuple[float, float]:
    half = _quantile(0.5 + level / 2, error.freedom) * error.standard
    return mean - half, mean + half


def _quantile(probability: float, freedom: float) -> float:
    """Returns that of Student's distribution, without the checks that make scipy.stats.t a hundred times as slow."""
    return float(special.stdtrit(freedom, probability))


def _judge(pair: PairedStarts, error: _Error, level: float, spread: Spread | None) -> Comparison:
    mean = float(np.mean(_means(pair)))
    low, high = (_ratio(bound) for bound in _interval(mean, error, level))
    detectable = detectable_difference(*error, level)
    claim: Claim = "none"
    if low > SMALLEST_CLAIM:
        claim = "slower"
    elif high < -SMALLEST_CLAIM:
        claim = "faster"
    is_blunt = claim == "none" and detectable > TARGET
    return _described(
        Comparison(
            first=pair.first,
            second=pair.second,
            num_pairs=len(pair.starts),
            slowdown=Interval(estimate=_ratio(mean), low=low, high=high),
            claim=claim,
            text="",
            detectable=detectable,
            more_repeats=_more_repeats(error, len(pair.starts), level) if is_blunt else None,
            spread=spread,
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


def _more_repeats(error: _Error, num_starts: int, level: float) -> int | None:
    """Returns how many more starts would detect `TARGET`; None if very many would not."""
    for number in range(num_starts + 1, _MAX_REPEATS):
        standard = error.standard * math.sqrt(num_starts / number)
        freedom = error.freedom * (number - 1) / (num_starts - 1)
        if detectable_difference(standard, freedom, level) <= TARGET:
            return number - num_starts
    return None
