"""What people would use instead, beside each ranked backend under the same conditions.

A peer, such as another library's trainer, draws its own batches. So it is compared by real tokens a second, which leave
out padding, and by the accuracy that it reaches, and it is never ranked among the backends.

Within a start, the speed of each is all of its tokens over all of its time, in the rounds that both took, so that a
turn counts as much as it lasts. How well the logarithm of the ratio is known follows from its jackknife pseudo-values,
one for each round (Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 11.5); they take the place of
turns in compare/report/statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from compare.report.grouping import EntrantRuns, condition
from compare.report.references import sample_of
from compare.report.runs import Run, TimedSteps, spent
from compare.report.statistics import PairedStarts, compare_group, mean_interval
from compare.results import Comparison, GroupResult, PeerComparison, PeerRow, Standing


class _Work(NamedTuple):
    """What was done in some steps: real tokens of all ranks, and the seconds in which all ranks together did it."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def without(self, other: _Work) -> _Work:
        return _Work(self.tokens - other.tokens, self.seconds - other.seconds)


def peers_of(
    peers: Sequence[list[EntrantRuns]],
    groups: Sequence[GroupResult],
    grouped: Sequence[list[EntrantRuns]],
    standings: Sequence[Standing],
) -> list[PeerComparison]:
    """Compares peers with each ranked backend under the same conditions.

    The opponent of the others, or else the fastest backend, has a row among them. All pairs have intervals that hold
    together, so that it does not matter by which of these times it was chosen.

    Args:
        peers: The runs of the peers of each group.
        groups: What was found of the others.
        grouped: Their runs.
        standings: With whom the others are compared.

    Returns:
        A comparison for each set of conditions, in the order of the standings.
    """
    opponents = {
        one.group: one.name
        for standing in standings
        for one in standing.placings
        if one.name == standing.placings[0].name
    }
    found = []
    for own in peers:
        wanted = condition(sample_of(own))
        same = [
            (result, entrants)
            for result, entrants in zip(groups, grouped, strict=True)
            if condition(sample_of(entrants)) == wanted
        ]
        if same:
            (result, entrants), *_ = same
            found.append(_comparison(own, result, entrants, opponents.get(result.group.key)))
    places = {one.group: place for place, standing in enumerate(standings) for one in standing.placings}
    return sorted(found, key=lambda one: places.get(one.group, len(standings)))


def _comparison(
    peers: list[EntrantRuns], result: GroupResult, entrants: list[EntrantRuns], opponent: str | None
) -> PeerComparison:
    speeds = {
        entrant.name: entrant.tokens_per_second.estimate
        for entrant in result.entrants
        if entrant.ranked and entrant.tokens_per_second is not None
    }
    opponent = opponent or max(speeds, key=lambda name: speeds[name], default=None)
    backends = [runs for runs in entrants if runs.name == opponent or runs.name in speeds]
    compared = compare_group([_paired(ours, peer) for ours in backends for peer in peers])
    against = {one.second: one for one in compared if one.first == opponent}
    return PeerComparison(
        group=result.group.key,
        opponent=opponent,
        num_starts=max((one.num_pairs for one in against.values()), default=0),
        num_epochs=sample_of(peers).record.config.num_train_epochs,
        rows=[
            *(_row(ours, None) for ours in backends if ours.name == opponent),
            *(_row(peer, against.get(peer.name)) for peer in peers),
        ],
        others=[one for one in compared if one.first != opponent],
    )


def _row(runs: EntrantRuns, comparison: Comparison | None) -> PeerRow:
    timed = [run for run in runs.timed if run.timed_steps]
    rates = [_sum([_work(run, span) for span in run.timed_steps]).rate for run in timed]
    tokens, positions = (
        sum(span.of(getattr(rank, what)) for run in timed for span in run.timed_steps for rank in run.record.ranks)
        for what in ("tokens", "positions")
    )
    return PeerRow(
        name=runs.name,
        failures=runs.failures,
        tokens_per_second=mean_interval(rates) if rates else None,
        positions_per_token=positions / tokens if tokens else None,
        cpu_seconds_per_token=_of_a_token(timed, "cpu_seconds", tokens),
        instructions_per_token=_of_a_token(timed, "instructions", tokens),
        longer=comparison.slowdown if comparison else None,
        claim=comparison.claim if comparison else None,
        metrics=runs.whole.record.quality if runs.whole else {},
    )


def _of_a_token(runs: Sequence[Run], what: Literal["cpu_seconds", "instructions"], tokens: int) -> float | None:
    cost = spent(runs, what)
    return cost / tokens if cost is not None and tokens else None


def _work(run: Run, span: TimedSteps) -> _Work:
    return _Work(sum(span.of(rank.tokens) for rank in run.record.ranks), sum(span.seconds))


def _sum(works: Sequence[_Work]) -> _Work:
    return _Work(sum(work.tokens for work in works), sum(work.seconds for work in works))


def _paired(ours: EntrantRuns, peer: EntrantRuns) -> PairedStarts:
    """Pairs the turns of a backend and of a peer; "first" is the backend."""
    first, second = _by_block(ours.timed), _by_block(peer.timed)
    starts = []
    for block in first:
        rounds = [
            (first[block][steps], second[block][steps]) for steps in first[block] if steps in second.get(block, {})
        ]
        if rounds:
            starts.append(pseudo_values(rounds))
    return PairedStarts(ours.name, peer.name, starts)


def _by_block(runs: Sequence[Run]) -> dict[tuple[str, int, int], dict[tuple[int, int], _Work]]:
    return {
        (run.race.race, run.race.block, run.race.heat): {
            (span.first, span.number): _work(run, span) for span in run.timed_steps
        }
        for run in runs
        if run.race is not None
    }


def pseudo_values(rounds: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> list[float]:
    """Returns the jackknife pseudo-values of the logarithm of the ratio of two speeds, with that ratio as their mean.

    Args:
        rounds: For each round, tokens and seconds of the first and of the second.
    """
    pairs = [(_Work(*first), _Work(*second)) for first, second in rounds]
    first, second, number = _sum([one for one, _ in pairs]), _sum([one for _, one in pairs]), len(pairs)
    whole = _log_ratio(first, second)
    if number == 1:
        return [whole]
    without = [_log_ratio(first.without(ours), second.without(theirs)) for ours, theirs in pairs]
    # The mean of pseudo-values is the estimate less its bias, which few rounds of unequal length would exaggerate.
    return [whole + (number - 1) * (sum(without) / number - one) for one in without]


def _log_ratio(first: _Work, second: _Work) -> float:
    """Returns how much longer the second takes for a real token than the first, as a logarithm."""
    return math.log(first.rate / second.rate)
