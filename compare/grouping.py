"""Which runs may be put together: only those that differ in nothing but what is compared.

Unlike things are never averaged. Runs of one *group* computed the same under equal conditions; within
it, an *entrant* is one backend in one version. A diagnosis run, and one trained to its end, belong to
the groups of their *family*, which differ from them in the number of steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.registry import BACKENDS
from launch.record import RunRecord

# What belongs to a backend, or to one start of a run, and not to what is computed.
_OF_A_START = {
    *("backend", "backend_settings", "start_method", "output_dir", "overwrite", "launch_command", "started_at"),
    *("race", "diagnose", "tracker", "master_port", "master_addr", "node_rank", "timeout", "logging_steps"),
}
_OF_A_PURPOSE = {"max_steps", "num_train_epochs"}
_OF_A_SPLIT = {"num_processes", "micro_batch_size", "threads_per_rank"}


@dataclass
class EntrantRuns:
    """The runs of one entrant in one group."""

    name: str
    timed: list[RunRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    diagnosis: RunRecord | None = None
    whole: RunRecord | None = None

    @property
    def sample(self) -> RunRecord | None:
        """A run to read conditions from."""
        return next(iter(self.timed), self.whole)


def purpose(record: RunRecord) -> str:
    """What the run was made for: "timed", "diagnosis" or "whole"."""
    race = record.config.get("race")
    if race:
        return str(race["purpose"])
    return "diagnosis" if record.config.get("diagnose") else "timed"


def condition(record: RunRecord) -> dict[str, Any]:
    """Everything that decides what was computed, and on what, whichever the backend."""
    conditions = {name: value for name, value in record.config.items() if name not in _OF_A_START}
    environment = record.environment
    conditions["machine"] = [environment.cpu, environment.num_cpus, environment.gpus]
    return conditions


def family(record: RunRecord) -> str:
    """The same, but for the number of steps, and for dropout: diagnosis runs have none."""
    conditions = {name: value for name, value in condition(record).items() if name not in _OF_A_PURPOSE}
    conditions["task_settings"] = {
        name: value for name, value in conditions["task_settings"].items() if name != "dropout"
    }
    return _key(conditions)


def unsplit(record: RunRecord) -> str:
    """The same again, however a global batch is split over ranks and micro-steps."""
    conditions = json.loads(family(record))
    steps = {name: record.config[name] for name in _OF_A_PURPOSE if purpose(record) != "whole"}
    return _key({name: value for name, value in conditions.items() if name not in _OF_A_SPLIT} | steps)


def group_runs(records: Sequence[tuple[str, RunRecord]]) -> list[list[EntrantRuns]]:
    """Puts runs into groups of entrants; runs trained to the end make a group where none was timed."""
    timed_families = {family(record) for _, record in records if purpose(record) == "timed"}
    groups: dict[str, dict[str, EntrantRuns]] = {}
    for name, record in records:
        if purpose(record) == "timed" or (purpose(record) == "whole" and family(record) not in timed_families):
            runs = groups.setdefault(_key(condition(record)), {})
            entrant = runs.setdefault(_entrant(record), EntrantRuns(str(record.config["backend"])))
            if record.status == "completed" and record.ranks:
                entrant.timed.append(record)
            else:
                entrant.failures.append(f"{record.error or 'it has no ranks'} ({name})")
    for runs in groups.values():
        for entrant_key, entrant in runs.items():
            if entrant.timed:
                _attach(entrant, entrant_key, records)
        _number_namesakes(list(runs.values()))
    return [sorted(runs.values(), key=_place_of) for runs in groups.values()]


def _place_of(entrant: EntrantRuns) -> tuple[int, str]:
    """In the order of the table of backends, then by name."""
    known = list(BACKENDS)
    name = entrant.name.partition(" ")[0]
    return (known.index(name) if name in known else len(known), entrant.name)


def _attach(entrant: EntrantRuns, entrant_key: str, records: Sequence[tuple[str, RunRecord]]) -> None:
    entrant.timed.sort(key=lambda record: float(record.config["started_at"]))
    wanted = family(entrant.timed[0])
    for name, record in records:
        if purpose(record) == "timed" or _entrant(record) != entrant_key or family(record) != wanted:
            continue
        if record.status != "completed" or not record.ranks:
            entrant.failures.append(f"{record.error} ({name})")
        elif purpose(record) == "diagnosis":
            entrant.diagnosis = record
        else:
            entrant.whole = record


def _number_namesakes(entrants: list[EntrantRuns]) -> None:
    """The same backend in two versions, or with two settings, is two entrants."""
    for name in {entrant.name for entrant in entrants}:
        namesakes = [entrant for entrant in entrants if entrant.name == name]
        for number, entrant in enumerate(namesakes[1:], start=2):
            entrant.name = f"{name} #{number}"


def _entrant(record: RunRecord) -> str:
    config, environment = record.config, record.environment
    own = {name: config[name] for name in ("backend", "backend_settings", "start_method")}
    return _key({**own, "packages": environment.packages, "commit": environment.git_commit})


def _key(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)
