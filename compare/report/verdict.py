"""What the first screen of a report says: a verdict that reads as advice.

Everything here is derived from the standings, so that no sentence contradicts a table or a figure.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import mean

from compare.machine_facts import is_between_machines
from compare.numbers import joined, number, points
from compare.report.long_steps import who_loses_to_long_steps
from compare.report.memory import savings
from compare.report.trust import WASTEFUL
from compare.report.words import largest, ranks, side_of_zero
from compare.results import (
    RANKED,
    Entrant,
    GroupResult,
    Interval,
    Placing,
    Results,
    Standing,
)
from compare.steps import Breakdown
from parity.verdict import SAME

# Entrants are called equally fast only if no two of them may differ by more.
_AS_GOOD_AS_EQUAL = 0.05
# What is said of one entrant, and of several, of which no difference is claimed, by the side of zero of the interval.
_UNDECIDED = {
    0: ("may be as fast, or differ", "may each be as fast, or differ"),
    1: ("probably takes longer,", "probably take longer,"),
    -1: ("probably takes less time,", "probably take less time,"),
}
_UNDECIDED_GAIN = {
    0: "gives nothing that this race could show",
    1: "probably makes it faster",
    -1: "probably makes it slower",
}


def describe_verdict(results: Results) -> list[str]:
    """Returns the verdict: who is fastest, what more ranks give, and who is left out. The first sentence is the most
    important.
    """
    sentences = []
    if results.standings:
        first = results.standings[0]
        sentences = [_speed(first, results), *_gain(first), *_approximations(first, results)]
    sentences += [
        *_own_settings(results.groups),
        *_wasteful(results.groups),
        *_long_steps(results.groups),
        *savings(results.groups),
        *_left_out(results.groups),
    ]
    if results.problems:
        number_of = "One thing" if len(results.problems) == 1 else f"{len(results.problems)} things"
        sentences.append(f"{number_of} could not be used or compared; the list is below.")
    return sentences


def _speed(standing: Standing, results: Results) -> str:
    """Says who is fastest with the most ranks, and how the others compare."""
    opponent, *others = standing.rivals
    name, where = opponent.name, f"On {ranks(opponent.num_processes)}"
    num_machines = len({place.machine for place in results.places})
    if num_machines > 1:
        where += f" ({standing.conditions})"  # which name the machine, and the network
    else:
        is_here = num_machines == 1 and not is_between_machines(standing.network)
        where += " of this machine" * is_here
        where += f" ({standing.network})" if standing.network is not None else ""
    if not others:
        rate = number(opponent.samples_per_second.estimate, 3)
        return f"{where}, only {name} is ranked: {rate} samples/s."
    equal, within = _equals(others, results)
    if equal:
        start = f"{joined([name, *(one.name for one in equal)])} are equally fast (within {points(within)} %)"
    elif all(one.claim == "slower" for one in others):
        start = f"{name} is the fastest"
    elif takes_the_least_time(standing):
        start = f"{name} took the least time"
    else:
        start = f"the others are compared with {name}"
    rest = [one for one in others if one not in equal]
    return "; ".join([f"{where}, {start}", *_relations(rest, standing, results)]) + "."


def takes_the_least_time(standing: Standing) -> bool:
    """Tells whether no rival was faster than the opponent, by turns or, after too few starts, by samples a second."""
    opponent, *others = standing.rivals
    return all(
        one.samples_per_second.estimate <= opponent.samples_per_second.estimate
        if one.longer is None
        else one.longer.estimate >= 0
        for one in others
    )


def _equals(rivals: Sequence[Placing], results: Results) -> tuple[list[Placing], float]:
    """Returns who is as fast as the opponent and as each other, and the most by which any two of them may differ."""
    found: list[Placing] = []
    most = 0.0
    pairs = {
        (result.group.key, frozenset((one.first, one.second))): one.slowdown
        for result in results.groups
        for one in result.comparisons
    }
    for rival in rivals:
        with_found = [pairs.get((rival.group, frozenset((one.name, rival.name)))) for one in found]
        differences = [rival.longer, *with_found]
        if all(map(_is_as_good_as_none, differences)):
            found.append(rival)
            most = max(most, *map(largest, differences))
    return found, most


def _is_as_good_as_none(difference: Interval | None) -> bool:
    return side_of_zero(difference) == 0 and largest(difference) <= _AS_GOOD_AS_EQUAL


def _relations(placings: Sequence[Placing], standing: Standing, results: Results) -> list[str]:
    """Says how entrants differ from the opponent; what holds for several of them is said once."""
    compared = [one for one in placings if one.claim != "too few"]
    decided = [one for one in compared if one.claim != "none"]
    reasons = [_reason(one, standing, results) for one in decided]
    shared = [reason for reason in dict.fromkeys(reasons) if reason and reasons.count(reason) > 1]
    said = _undecided([(one.name, one.longer) for one in compared if one.claim == "none"])
    for one, reason in zip(decided, reasons, strict=True):
        said.append(_decided(one) + (f", most of it {reason}" if reason and reason not in shared else ""))
    most: list[str] = []
    for reason in shared:
        names = [one.name for one, its in zip(decided, reasons, strict=True) if its == reason]
        most.append(f"for {_among(names, compared)}, {'' if most else 'most of the difference is '}{reason}")
    if most:
        said.append(", and ".join(most))
    unknown = [one.name for one in placings if one.claim == "too few"]
    return said + ([f"{joined(unknown)} cannot be compared after so few starts"] if unknown else [])


def _among(names: list[str], placings: Sequence[Placing]) -> str:
    """Names several of the entrants that a sentence is about, in few words where they are all, or all but one."""
    others = [one.name for one in placings if one.name not in names]
    if not others:
        return "both" if len(names) == 2 else "all of these"
    return f"all but {others[0]}" if len(others) == 1 and len(names) > 2 else joined(names)


def _decided(placing: Placing) -> str:
    """Says how much more or less time an entrant takes of which that is claimed."""
    longer = placing.longer
    assert longer is not None
    assert longer.low is not None
    assert longer.high is not None
    if placing.claim == "faster":
        bounds = f"[{points(-longer.high)}, {points(-longer.low)}]"
        return f"{placing.name} takes {points(-longer.estimate)} % less time {bounds}"
    return f"{placing.name} takes {points(longer.estimate)} % longer [{points(longer.low)}, {points(longer.high)}]"


def _undecided(those: Sequence[tuple[str, Interval | None]]) -> list[str]:
    """Says by how much entrants may differ of which no difference is claimed: an interval close to zero is no proof.

    Args:
        those: The name of each, with how much longer it takes.
    """
    said = []
    for side, (one, several) in _UNDECIDED.items():
        found = [(name, longer) for name, longer in those if side_of_zero(longer) == side]
        if found:
            names, most = joined([name for name, _ in found]), joined([points(largest(longer)) for _, longer in found])
            said.append(f"{names} {one if len(found) == 1 else several} by up to {most} %")
    return said


def _reason(placing: Placing, standing: Standing, results: Results) -> str:
    """Returns what an entrant mostly loses its time to, if that is communication, waiting or both; "" otherwise."""
    mine, theirs = (breakdown_of(one, results) for one in (placing, standing.placings[0]))
    if placing.claim != "slower" or mine is None or theirs is None or mine.total <= theirs.total:
        return ""
    share = {
        part: (mine.resolved(part) - theirs.resolved(part)) / (mine.total - theirs.total)
        for part in ("communication", "waiting")
    }
    most = [part for part, its in share.items() if its > 0.5]
    if mine.tells_waiting and most:
        return most[0]
    return "communication and waiting" if sum(share.values()) > 0.5 else ""


def breakdown_of(placing: Placing, results: Results) -> Breakdown | None:
    """Returns where the time of a step of an entrant goes; None if that was not diagnosed."""
    entrant = _entrant(placing, results)
    return entrant.breakdown if entrant is not None else None


def _entrant(placing: Placing, results: Results) -> Entrant | None:
    entrants = [one for result in results.groups if result.group.key == placing.group for one in result.entrants]
    return next((one for one in entrants if one.name == placing.name), None)


def _gain(standing: Standing) -> list[str]:
    """Says what more ranks give, what would be possible, and whether one process does as well."""
    parts = []
    opponent, base = standing.placings[0], standing.base
    if base is not None:
        parts.append(_more_ranks(opponent, base))
    # Other numbers of processes that work alone are the limit of other numbers of ranks.
    fitting = [one for one in standing.limits if one.num_processes in (1, opponent.num_processes)]
    parts += [said for limit in fitting if (said := _limit(limit, standing))]
    sentence = "; ".join(parts)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []


def _more_ranks(opponent: Placing, base: Placing) -> str:
    second = (opponent.num_processes, base.num_processes) == (2, 1)
    who = "a second rank" if second else f"going from {base.num_processes} to {ranks(opponent.num_processes)}"
    gain = speed_of(opponent, base)
    of_what = "the speed of one" if second else f"the speed of {ranks(base.num_processes)}"
    if base.longer is None:
        return f"{who} gives {_times(gain)} times {of_what}, by too few starts to claim it"
    if base.claim == "none":
        return f"{who} {_UNDECIDED_GAIN[side_of_zero(base.longer)]}: {_range(base.longer)} times {of_what}"
    if base.claim == "faster":
        return f"{who} makes it slower: {_times(gain)} times {of_what}"
    return f"{who} gives {_times(gain)} times {of_what}"


def _times(gain: float) -> str:
    """Formats a speed relative to another, of which one decimal might not show on which side of one it is."""
    return f"{gain:.2f}" if abs(gain - 1) < 0.1 else number(gain, 2)


def _range(longer: Interval) -> str:
    if longer.low is None or longer.high is None:
        return ""
    return f"{_times(1 + longer.low)} to {_times(1 + longer.high)}"


def _limit(limit: Placing, standing: Standing) -> str:
    """Says how a limit compares: processes that work alone, or one process."""
    if limit.num_processes > 1:
        return _possible(limit, standing)
    if _is_as_good_as_none(limit.longer):
        return f"{limit.label} would be as fast (within {points(largest(limit.longer))} %)"
    if limit.claim == "none":
        return _undecided([(limit.label, limit.longer)])[0]
    if limit.longer is None:
        return ""
    difference = "longer" if limit.longer.estimate > 0 else "less time"
    return f"{limit.label} would take {points(abs(limit.longer.estimate))} % {difference}"


def _possible(limit: Placing, standing: Standing) -> str:
    """Says what processes reach that work alone."""
    opponent, base = standing.placings[0], standing.base
    if limit.claim == "too few":
        return ""
    if limit.claim == "none":
        return _undecided_loss(limit.longer)
    if base is None:
        if limit.claim == "slower":
            return "no more is possible"
        return f"{points(speed_of(opponent, limit))} % of what is possible here is reached"
    most = speed_of(limit, base)
    return f"at most {_times(most)} is possible here" if most > speed_of(opponent, base) else "no more is possible"


def _undecided_loss(longer: Interval | None) -> str:
    """Says how much of a step ranks may lose to communication of which that was not shown.

    Args:
        longer: How much longer than theirs a step of processes takes that work alone.
    """
    if longer is None or longer.low is None or longer.low >= 0:
        return "no loss to communication was shown"
    is_probable = side_of_zero(longer) < 0
    loss = "ranks probably lose time to communication" if is_probable else "no loss to communication was shown"
    return f"{loss} (at most {points(-longer.low)} % of a step)"


def speed_of(one: Placing, other: Placing) -> float:
    """Returns the speed of one entrant relative to another's, from their pairs where they were compared."""
    if one.relative is None or other.relative is None:
        return one.samples_per_second.estimate / other.samples_per_second.estimate
    return other.relative / one.relative


def _approximations(standing: Standing, results: Results) -> list[str]:
    """Says what entrants gain that compute an approximation on purpose, and how far they go astray."""
    opponent = standing.placings[0]
    found = [one for one in standing.approximations if one.num_processes == opponent.num_processes]
    if not found:
        return []
    relations = "; ".join(_relations(found, standing, results))
    sentences = [f"Only an approximation, and not ranked; beside {opponent.name}, {relations}."]
    distances = {one.name: entrant.parity.distance for one in found if (entrant := _entrant(one, results)) is not None}
    off = {name: number(100 * distance, 2) for name, distance in distances.items() if distance is not None}
    if off:
        weights = f"The weights of {joined([*off])} are off by {joined([*off.values()])} %"
        sentences.append(f"{weights} of the way that training moved them.")
    return sentences


def _own_settings(groups: Sequence[GroupResult]) -> list[str]:
    """Says in one sentence which settings entrants have of their own, such as those that --tune found.

    Those whose name is made of their settings are left out.
    """
    everyone = [(group.group.key, one) for group in groups for one in group.entrants if one.role == "backend"]
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, Entrant]]] = {}
    for key, one in everyone:
        own = tuple(one.own_settings or ())
        if not all(setting in one.name or setting.replace("=", " ", 1) in one.name for setting in own):
            found.setdefault((one.name, own), []).append((key, one))
    listed = [f"{joined(_named(those, everyone))}: {shlex.join(own)}" for (_, own), those in found.items()]
    return [f"Settings of their own: {'; '.join(listed)}."] if listed else []


def _wasteful(groups: Sequence[GroupResult]) -> list[str]:
    """Names who sends several times what its gradients need, though it may compute the same."""
    most: dict[str, tuple[float, str]] = {}
    for entrant in (one for group in groups for one in group.entrants if one.role in RANKED):
        if (excess := entrant.excess or 0.0) >= max(WASTEFUL, most.get(entrant.name, (0.0, ""))[0]):
            same = "computes the same but " if entrant.parity.verdict in SAME else ""
            times = f"{number(excess, 2)} times what its gradients need"
            most[entrant.name] = excess, f"{entrant.name} {same}sends {times}."
    return [sentence for _, sentence in most.values()]


def _long_steps(groups: Sequence[GroupResult]) -> list[str]:
    """Names who loses more than others to rare long steps, where it loses most."""
    most: dict[str, tuple[float, str]] = {}
    for group in groups:
        for one, least in who_loses_to_long_steps(group):
            share = mean(one.shares_of_long_steps)
            if share > most.get(one.name, (0.0, ""))[0]:
                others = points(mean(least.shares_of_long_steps))
                most[one.name] = (
                    share,
                    f"Rare long steps take {points(share)} % of the time of {one.name}, and {others} % of that of "
                    f"{least.name} ({group.group.key}): samples/s counts them, and comparisons do not.",
                )
    return [sentence for _, sentence in most.values()]


def _left_out(groups: Sequence[GroupResult]) -> list[str]:
    """Names who is not ranked although it took part: it computes something else, cannot be judged, or failed."""
    everyone = [(group.group.key, one) for group in groups for one in group.entrants if one.role in RANKED]
    wrong = [(key, one) for key, one in everyone if one.parity.verdict == "not comparable"]
    found = {
        "Not ranked, because of a computation that differs": [
            (key, one) for key, one in wrong if one.parity.cause is None
        ],
        "Not ranked, because BatchNorm takes its statistics from other samples than one process does "
        "(--sync-batchnorm takes those of all ranks)": [
            (key, one) for key, one in wrong if one.parity.cause is not None
        ],
        "Not ranked, because it could not be told whether the same is computed": [
            (key, one) for key, one in everyone if one.parity.verdict == "unknown" and one.num_runs
        ],
        "Failed, and left out": [(key, one) for key, one in everyone if not one.num_runs and one.failures],
    }
    return [f"{why}: {joined(_named(those, everyone))}." for why, those in found.items() if those]


def _named(found: Sequence[tuple[str, Entrant]], everyone: Sequence[tuple[str, Entrant]]) -> list[str]:
    """Names entrants, each with the groups in which it was found, unless it was in all in which it takes part.

    Args:
        found: The entrants, each with the key of its group.
        everyone: The same of all.
    """
    named = []
    for name in dict.fromkeys(one.name for _, one in found):
        keys, all_keys = ([key for key, one in members if one.name == name] for members in (found, everyone))
        named.append(name if keys == all_keys else f"{name} ({'; '.join(keys)})")
    return named
