"""The baseline of a gate: an earlier race, whether it can be compared with this one, and in what the two differ."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.devices import count_gpus
from compare.machine_facts import Machine, Place
from compare.report.grouping import asked
from compare.report.headings import leaves
from compare.report.machines import describe_machine, same_machine
from compare.report.places import versions_of
from compare.report.reading import read_results_file
from compare.results import MIN_PAIRS, Entrant, Group, Results, Setting
from launch.errors import UsageError
from launch.quantities import Share
from records.config import RunConfig
from records.environment import describe_environment

ALLOW = "--allow-other-baseline"
_DEFAULT_SHARE = 0.03
_MOST_SHOWN = 3
# What conditions do not name where all ranks are on one node.
_NO_NETWORK = "one node"
# How ranks were scheduled before there was a choice.
_USUAL = "normal"
# What groups are matched by, so that it needs no comparison of its own.
_OF_A_CELL = ("num_processes", "precision", "global_batch_size", "micro_batch_size", "device")


class GateOptions(BaseModel):
    """What a user may ask of a gate."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    baseline: Path | None = Field(
        None,
        description="results.json of an earlier race: end with 3 if an entrant has become slower, is no longer in "
        "lockstep, or is missing",
    )
    fail_above: Share | None = Field(
        None, description="how much slower than in the baseline is too slow, such as 5% (default: 3%)"
    )
    allow_other_baseline: bool = Field(
        False, description="compare with a baseline of another machine, data or versions, too"
    )

    @model_validator(mode="after")
    def _has_a_baseline(self) -> GateOptions:
        if self.baseline is None:
            for name in ("fail_above", "allow_other_baseline"):
                if getattr(self, name):
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option}: needs a baseline; add --baseline results.json, or leave it out")
        return self


class Cell(NamedTuple):
    """What an entrant of a race and the same entrant of another have in common."""

    name: str
    num_processes: int
    precision: str
    global_batch_size: int
    micro_batch_size: int
    device: str


@dataclass(frozen=True)
class Baseline:
    """An earlier race that another is compared with.

    Attributes:
        results: What it found.
        fail_above: How much slower an entrant may be now.
        is_other_allowed: Whether it may be of another machine, or of other data or versions.
    """

    results: Results
    fail_above: float
    is_other_allowed: bool

    @property
    def description(self) -> str:
        """When it was made, and from what commit."""
        commits = {str(entrant.settings.get("commit", "unknown")) for _, entrant in entrants_of(self.results).values()}
        return f"{self.results.title}, made {self.results.created_at} from commit {', '.join(sorted(commits))}"

    @property
    def num_starts(self) -> int:
        """How often each of its entrants was started."""
        return max(entrant.num_runs for _, entrant in entrants_of(self.results).values())

    @property
    def num_steps(self) -> int | None:
        """The number of steps of each start, if it is the same for all."""
        found = {group.conditions["max_steps"] for group, _ in entrants_of(self.results).values()}
        return found.pop() if len(found) == 1 and min(found) > 0 else None

    def refuse(self, differences: list[str]) -> None:
        """Refuses a baseline that differs in something, unless the user allows it.

        Raises:
            UsageError: It is not allowed; the text says in what the baseline differs.
        """
        if differences and not self.is_other_allowed:
            more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
            shown = "; ".join(differences[:_MOST_SHOWN])
            raise UsageError(f"--baseline: {shown}{more}; make one of this kind, or add {ALLOW}")


def read_baseline(options: GateOptions) -> Baseline | None:
    """Reads the baseline that a user asks for; returns None without one.

    Raises:
        UsageError: It cannot be a baseline.
    """
    if options.baseline is None:
        return None
    try:
        results = read_results_file(options.baseline)
    except UsageError as error:
        raise UsageError(f"--baseline {error}") from error
    named = f"--baseline {options.baseline}"
    entrants = entrants_of(results)
    if not entrants:
        raise UsageError(f"{named}: holds no entrant that was measured and in lockstep; give another race")
    refuse_without_facts(results, f"{named}:")
    if len(machines_of(results.places)) > 1:
        raise UsageError(f"{named}: is about several machines; give the results of one")
    for _, entrant in entrants.values():
        if (number := len(entrant.samples_per_second_of_runs)) < MIN_PAIRS:
            raise UsageError(
                f"{named}: {entrant.name} was started {number} time(s), which does not tell how much starts differ; a "
                f"baseline needs {MIN_PAIRS} starts of each entrant"
            )
    share = options.fail_above if options.fail_above is not None else _DEFAULT_SHARE
    return Baseline(results, share, options.allow_other_baseline)


def refuse_without_facts(results: Results, named: str) -> None:
    """Refuses results of an older version: in what they differ from others would not be found.

    Args:
        results: The results.
        named: How the message calls them.

    Raises:
        UsageError: They are of an older version.
    """
    groups = [group for group, _ in entrants_of(results).values()]
    if not all(group.conditions for group in groups) or not all(one.versions for one in results.places):
        raise UsageError(
            f"{named} was made by an older version, which did not note machine, data and versions as facts; make it "
            "again from its records, with launch/run.sh report"
        )


def entrants_of(results: Results) -> dict[Cell, tuple[Group, Entrant]]:
    """Returns the entrants that were measured and in lockstep.

    Raises:
        UsageError: Two of them cannot be told apart, since the results are of several data, models or machines.
    """
    found: dict[Cell, tuple[Group, Entrant]] = {}
    for result in results.groups:
        for entrant in result.entrants:
            if entrant.ranked and entrant.samples_per_second is not None:
                cell = cell_of(entrant, result.group)
                if cell in found:
                    raise UsageError(
                        f"{entrant.name} is there twice, as {found[cell][0].key} and as {result.group.key}; "
                        "a gate needs results of one machine, one data set and one model"
                    )
                found[cell] = result.group, entrant
    return found


def cell_of(entrant: Entrant, group: Group) -> Cell:
    """Returns what an entrant is matched by."""
    return Cell(entrant.name, *(getattr(group, name) for name in _OF_A_CELL))


def differences_before(
    baseline: Baseline,
    planned: Sequence[tuple[str, list[str], RunConfig]],
    networks: Mapping[int, str],
    *,
    num_steps: int | None,
    is_complete: bool = True,
) -> list[str]:
    """Returns in what a baseline differs from a race that has not begun.

    Args:
        baseline: The baseline.
        planned: The name of each entrant of the race, its own settings, and the configuration of a timed run.
        networks: The network of so many ranks, in words, where they are on several nodes.
        num_steps: The number of steps of each start, if it is known.
        is_complete: Whether no other entrant can take part.

    Raises:
        UsageError: The race leaves out an entrant of the baseline.
    """
    by_cell = {
        Cell(name, *(getattr(config, field) for field in _OF_A_CELL)): (own, config) for name, own, config in planned
    }
    ours = {cell: config for cell, (_, config) in by_cell.items()}
    own_settings = {cell: own for cell, (own, _) in by_cell.items()}
    theirs = entrants_of(baseline.results)
    for cell, (group, entrant) in theirs.items():
        if cell not in ours and is_complete:
            raise UsageError(
                f"--baseline: has {entrant.name} ({group.key}), which does not take part in this race; let it take "
                "part, or give a baseline without it"
            )
    environment = describe_environment(with_torch=count_gpus() > 0)
    machine = describe_machine(environment, [socket.gethostname()])
    # How many steps a start has may not be settled yet.
    steps = {} if num_steps is None else {"max_steps": num_steps}
    conditions = {
        cell: {**_without_steps(asked(config)), "network": networks.get(cell.num_processes, _NO_NETWORK), **steps}
        for cell, config in ours.items()
    }
    return [
        *_of_machines(machines_of(baseline.results.places), [machine]),
        *_of_versions(baseline.results.places, [versions_of(environment)]),
        *_of_conditions(theirs, conditions),
        *_of_scheduling(theirs, {cell: config.scheduling for cell, config in ours.items()}),
        *_of_own_settings(theirs, own_settings),
    ]


def differences_between(baseline: Baseline, results: Results) -> list[str]:
    """Returns in what a baseline differs from the results of another race, one line each."""
    entrants, theirs = entrants_of(results), entrants_of(baseline.results)
    conditions = {cell: group.conditions for cell, (group, _) in entrants.items()}
    scheduling = {cell: entrant.settings.get("scheduling") for cell, (_, entrant) in entrants.items()}
    own_settings = {cell: entrant.own_settings for cell, (_, entrant) in entrants.items()}
    return [
        *_of_machines(machines_of(baseline.results.places), machines_of(results.places)),
        *_of_versions(baseline.results.places, [place.versions for place in results.places]),
        *_of_conditions(theirs, conditions),
        *_of_scheduling(theirs, scheduling),
        *_of_own_settings(theirs, own_settings),
    ]


def _without_steps(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "max_steps"}


def machines_of(places: Iterable[Place]) -> list[Machine]:
    """Returns the machines of a report."""
    return list({place.hardware.label: place.hardware for place in places if place.hardware is not None}.values())


def _of_machines(theirs: list[Machine], ours: list[Machine]) -> list[str]:
    if all(same_machine(one, other) for one in theirs for other in ours):
        return []
    then, now = (" and ".join(machine.label for machine in machines) for machines in (theirs, ours))
    return [f"it is of another machine ({then}{', not ' + now if now != then else ' of another name'})"]


def _of_versions(places: Iterable[Place], ours: Iterable[Mapping[str, str]]) -> list[str]:
    """Compares the versions of what both have."""
    then, now = _values([place.versions for place in places]), _values(ours)
    return [
        f"it is of {name} {' and '.join(then[name])}, not {' and '.join(now[name])}"
        for name in then
        if name in now and then[name] != now[name]
    ]


def _values(mappings: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def _of_conditions(theirs: Mapping[Cell, tuple[Group, Entrant]], ours: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    """Compares the options, and the facts about data and model, of the same entrants; each difference is said once."""
    found: dict[str, None] = {}
    for cell, conditions in ours.items():
        if cell in theirs:
            then, now = _facts(theirs[cell][0].conditions), _facts(conditions)
            differing = [name for name in now if name in then and then[name] != now[name]]
            found |= dict.fromkeys(f"its {name} is {then[name]}, not {now[name]}" for name in differing)
    return list(found)


def _of_scheduling(theirs: Mapping[Cell, tuple[Group, Entrant]], ours: Mapping[Cell, Setting]) -> list[str]:
    """Compares how the ranks of the same entrants are scheduled; what does not say so was scheduled as usual."""
    found: dict[str, None] = {}
    for cell, now in ours.items():
        if cell in theirs:
            then = theirs[cell][1].settings.get("scheduling", _USUAL)
            if then != (now or _USUAL):
                found[f"its ranks have the scheduling {then}, not {now or _USUAL}"] = None
    return list(found)


def _of_own_settings(theirs: Mapping[Cell, tuple[Group, Entrant]], ours: Mapping[Cell, list[str] | None]) -> list[str]:
    """Compares the settings of their own of entrants with the same name, such as those that --tune found each time.

    Older results do not have them, and are not compared in this.
    """
    found: dict[str, None] = {}
    for cell, now in ours.items():
        then = theirs[cell][1].own_settings if cell in theirs else None
        if then is not None and now is not None and then != now:
            was, has = (shlex.join(own) or "no settings of its own" for own in (then, now))
            found[f"its {cell.name} has {was}, not {has}"] = None
    return list(found)


def _facts(conditions: Mapping[str, Any]) -> dict[str, str]:
    """Returns conditions by names for people, those of the data beside the options."""
    data = conditions.get("data") or {}
    others = {name: value for name, value in conditions.items() if name != "data"}
    return dict(leaves({"network": _NO_NETWORK, **others, **data}))
