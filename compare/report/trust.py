"""How far a report can be trusted: whether the race was disturbed or too short, and whether all computed the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compare.numbers import joined, number, points
from compare.report.statistics import detectable_later
from compare.results import DISTURBED_SHARE, MIN_PAIRS, RANKED, TARGET, GroupResult, Results, Standing
from parity.verdict import SAME

# What more time would show is said of a race so many times as long.
_LONGER = 4
# An entrant that sends so many times what its gradients need is named. Less is what libraries send besides: gloo, for
# example, reduces and scatters by an all-reduce.
WASTEFUL = 1.5


@dataclass(frozen=True)
class Ground:
    """One reason to trust a report, or not to.

    Attributes:
        question: What it is about, in a few words.
        answer: What was found.
        state: Whether it speaks for the report.
    """

    question: str
    answer: str
    state: Literal["good", "bad", "open"]


def warnings_of(results: Results) -> list[str]:
    """Returns why this report is not to be relied on: the race was disturbed, or it was too short."""
    sentences = []
    idleness = results.idleness
    if idleness is not None and idleness.mean > DISTURBED_SHARE:
        sentences.append(
            f"The machine was disturbed: other programs took {points(idleness.mean)} % of its cores "
            f"(up to {points(min(1, idleness.largest))} %). Repeat the race on an idle machine."
        )
    compared = [one for one in results.standings if len(one.placings) > 1]
    if not compared:
        return sentences
    shortest = min(compared, key=lambda one: one.num_starts)
    if (fewest := shortest.num_starts) < MIN_PAIRS:
        times = "once" if fewest == 1 else f"{fewest} times"
        is_same = len(set(_starts_of(shortest, results))) == 1
        who = "each entrant" if is_same else f"{shortest.opponent}, with which all others are compared,"
        sentences.append(
            f"The race was too short: {who} was started {times}, and nothing is claimed of fewer than "
            f"{MIN_PAIRS} starts. Give it more time."
        )
    # One whose entrants have too few starts has no such difference.
    blurred = max(compared, key=lambda one: one.detectable or 0.0)
    if blurred.detectable is not None and blurred.detectable > TARGET:
        sentences.append(
            "The race was too short for this machine: one race of five like this misses a difference of "
            f"{points(blurred.detectable)} %{_of(blurred, results)}. Give it more time, or a quieter machine."
        )
    return sentences


def _starts_of(standing: Standing, results: Results) -> list[int]:
    """Returns how often each entrant of a standing was started, the opponent first."""
    known = {(group.group.key, one.name): one.num_runs for group in results.groups for one in group.entrants}
    others = [known.get((one.group, one.name), standing.num_starts) for one in standing.placings[1:]]
    return [standing.num_starts, *others]


def _too_few(standing: Standing, results: Results) -> list[str]:
    """Names those who were started together with the opponent too seldom to be compared with it."""
    of = _of(standing, results)
    return [f"{one.label}{of}" for one in standing.undecided if one.claim == "too few"]


def _of(standing: Standing, results: Results) -> str:
    return "" if standing == results.standings[0] else f" ({standing.conditions})"


def grounds_of(results: Results) -> list[Ground]:
    """Returns why the report may be trusted, in a few words each."""
    grounds = [_same_computation(results.groups), *_what_is_sent(results.groups), _idle_machine(results)]
    if results.standings:
        grounds.append(_repeated(results.standings[0], results))
        compared = [one for one in results.standings if len(one.placings) > 1]
        if compared:
            grounds.append(_overlooked(compared, results))
    return grounds


def _repeated(standing: Standing, results: Results) -> Ground:
    """Says how often entrants were started: some may have failed in starts in which others did not."""
    number, *others = _starts_of(standing, results)
    is_same = not others or {*others} == {number}
    starts = "1 start" if number == 1 else f"{number} starts"
    turns = f", {standing.num_turns} turns in all" if standing.num_turns else ""
    answer = f"{starts} of {'each entrant' if is_same else standing.opponent}{turns}"
    if not is_same:
        answer += f"; of the others, at least {min(others)}"
    if standing.num_disturbed:
        answer += f"; left out, since other programs disturbed: {standing.num_disturbed} more"
    return Ground("Repeated", answer, "good" if min([number, *others]) >= MIN_PAIRS else "bad")


def _same_computation(groups: Sequence[GroupResult]) -> Ground:
    held = [one for group in groups for one in group.entrants if one.num_runs and one.role in RANKED]
    named = {
        verdict: dict.fromkeys(one.name for one in held if one.parity.verdict == verdict)
        for verdict in ("unknown", "approximate")
    }
    judged = [one.parity.verdict for one in held if one.parity.verdict not in named]
    asked, unknown = named["approximate"], named["unknown"]
    besides = f"; on purpose, {joined(list(asked))} only approximately" if asked else ""
    besides += f"; of {joined(list(unknown))}, it could not be told" if unknown else ""
    question = "Same computation"
    if {*judged} <= {"reference"}:  # with which nobody was compared
        return Ground(question, f"was not checked{besides}", "open")
    wrong = len([verdict for verdict in judged if verdict not in SAME])
    same = "to the last bit" if "rounding" not in judged else "up to rounding"
    if len(judged) == 1:
        found = "computes something else" if wrong else f"trains the same model as the reference, {same}"
        answer = f"the only entrant that was judged {found}"
    elif wrong:
        answer = f"{wrong} of {len(judged)} entrants compute something else"
    else:
        everyone = "both" if len(judged) == 2 else f"all {len(judged)}"
        which = " exact" if asked else " judged" if unknown else ""
        answer = f"{everyone}{which} entrants train the same model, {same}"
    return Ground(question, f"{answer}{besides}", "bad" if wrong else "open" if unknown else "good")


def _what_is_sent(groups: Sequence[GroupResult]) -> list[Ground]:
    """Names all who send several times what their gradients need, in any group; who sends most comes first."""
    counted = [one for group in groups for one in group.entrants if one.role in RANKED]
    times: dict[str, float] = {}
    for one in sorted(counted, key=lambda one: one.excess or 0.0, reverse=True):
        if one.excess is not None and one.excess >= WASTEFUL:
            times.setdefault(one.name, one.excess)
    if not times:
        return []
    (first, most), *others = times.items()
    senders = [f"{first} sends {number(most, 2)}", *(f"{name} {number(excess, 2)}" for name, excess in others)]
    whose = "their" if others else "its"
    return [Ground("Bytes sent", f"{joined(senders)} times what {whose} gradients need", "bad")]


def _overlooked(compared: Sequence[Standing], results: Results) -> Ground:
    """Says which difference from the opponent may have been overlooked, of those that the report is to find."""
    question, standing = "Overlooked", max(compared, key=lambda one: one.detectable or 0.0)
    smallest, few = standing.detectable, [label for one in compared for label in _too_few(one, results)]
    if not any(one.undecided for one in compared):
        return _nothing_overlooked(question, compared)
    if smallest is None:
        return Ground(question, f"perhaps much: too few starts of {joined(few)}", "bad")
    least_known = max(standing.undecided, key=lambda one: one.detectable or 0.0)
    later = points(detectable_later(smallest, _LONGER, spread=least_known.spread, num_starts=standing.num_starts))
    missed = f"one race of five misses a difference of {points(smallest)} %{_of(standing, results)}"
    answer = f"{missed}; if it is {_LONGER} times as long, one of {later} %"
    if few:
        answer += f"; and perhaps much: too few starts of {joined(few)}"
    return Ground(question, answer, "good" if smallest <= TARGET and not few else "bad")


def _nothing_overlooked(question: str, compared: Sequence[Standing]) -> Ground:
    """Says whose difference from the opponent was shown: limits, approximations and all others are not meant."""
    opponent = compared[0].opponent
    meant = ["of those with as many ranks"] if any(len(one.rivals) > 1 for one in compared) else []
    meant += ["of the fastest with the fewest ranks"] if any(one.base for one in compared) else []
    if not meant:
        return Ground(question, f"not told, since all others have more ranks than {opponent}", "open")
    return Ground(question, f"nothing: {joined(meant)}, every difference from {opponent} was shown", "good")


def _idle_machine(results: Results) -> Ground:
    idleness = results.idleness
    if idleness is None:
        return Ground("Idle machine", "nobody watched", "open")
    answer = f"other programs took {points(idleness.mean)} % of the cores, at most {points(min(1, idleness.largest))} %"
    return Ground("Idle machine", answer, "good" if idleness.mean <= DISTURBED_SHARE else "bad")
