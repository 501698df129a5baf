"""Which runs may be put together: only those that differ in nothing but what is compared.

Unlike things are never averaged. Runs of one *group* computed the same under equal conditions; within
it, an *entrant* is one backend in one version, with the same settings in force. A diagnosis run, and
one trained to its end, belong to the group that differs from them in the number of steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.registry import BACKENDS
from records.record import RunRecord

# What belongs to a backend, or to one start of a run, and not to what is computed.
_OF_A_START = {
    *("backend", "backend_settings", "start_method", "output_dir", "overwrite", "launch_command", "started_at"),
    *("race", "diagnose", "master_port", "master_addr", "node_rank", "timeout", "hang_timeout", "max_restarts"),
    *("num_restarts", "keep", "on_save_error", "resume", "resume_from"),
}
_OF_A_SPLIT = {"num_processes", "micro_batch_size", "threads_per_rank"}
_OF_A_BACKEND = ("backend", "backend_settings", "start_method")
# Variables in which a launcher tells a rank of one job where it is, or sets up its library; those of the user that
# have such names reach no rank.
_OF_A_PLACE = ("_PORT", "_RANK", "_SIZE", "_ADDR", "_HOSTNAME", "_NUM_THREADS")
_OF_A_LAUNCHER = ("ACCELERATE_", "TORCH_NCCL_ASYNC_", "OMPI_MCA_orte", "OMPI_MCA_ess", "OMPI_MCA_pmix")

NamedRecords = Sequence[tuple[str, RunRecord]]


@dataclass
class EntrantRuns:
    """The runs of one entrant in one group; `key` is the same in all groups, `name` is for people."""

    name: str
    key: str
    timed: list[RunRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    diagnosis: RunRecord | None = None
    whole: RunRecord | None = None


def purpose(record: RunRecord) -> str:
    """What the run was made for: "timed", "diagnosis" or "whole"."""
    race = record.config.get("race")
    if race:
        return str(race["purpose"])
    return "diagnosis" if record.config.get("diagnose") else "timed"


def is_usable(record: RunRecord) -> bool:
    """Whether the run completed, and was timed from its beginning."""
    return record.status == "completed" and bool(record.ranks) and record.resumed_from is None


def why_unusable(record: RunRecord) -> str:
    """What is wrong with a run that is not usable."""
    if record.error is None and record.resumed_from is not None:
        return f"it went on after step {record.resumed_from.step}: what it took is not what a whole run takes"
    return str(record.error)


def condition(record: RunRecord) -> dict[str, Any]:
    """Everything that decides what was computed, and on what, whichever the backend."""
    environment = record.environment
    return {
        **_asked(record),
        "data": record.task,
        "machine": [environment.cpu, environment.num_cpus, environment.gpus],
    }


def unsplit(record: RunRecord) -> str:
    """The same, however a global batch is split over ranks and micro-steps."""
    return _key({name: value for name, value in condition(record).items() if name not in _OF_A_SPLIT})


def group_runs(records: NamedRecords) -> list[list[EntrantRuns]]:
    """Puts runs into groups of entrants, those of one group in the order of the table of backends.

    A run trained to its end makes a group of its own where none was timed.
    """
    completed = [record for _, record in records if is_usable(record)]
    groups: dict[str, dict[str, EntrantRuns]] = {}
    for record in completed:
        if purpose(record) == "timed" or (purpose(record) == "whole" and not _has_timed(record, completed)):
            entrants = groups.setdefault(_key(condition(record)), {})
            key = _entrant(record)
            entrants.setdefault(key, EntrantRuns(str(record.config["backend"]), key)).timed.append(record)
    for entrants in groups.values():
        for entrant in entrants.values():
            _attach(entrant, completed)
    for name, record in records:
        if not is_usable(record):
            _attach_failure(name, record, groups)
    for entrants in groups.values():
        _number_namesakes(list(entrants.values()))
    return [sorted(entrants.values(), key=_place_of) for entrants in groups.values()]


def _asked(record: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in record.config.items() if name not in _OF_A_START}


def _belongs(other: RunRecord, timed: RunRecord) -> bool:
    """Whether a diagnosis or whole run is one of a timed run's group, but for the number of its steps."""
    # Dropout is off in diagnosis runs: its masks depend on how a batch is split.
    leave_out = {"max_steps", "dropout"} if purpose(other) == "diagnosis" else {"max_steps"}
    return _key(_without(condition(other), leave_out)) == _key(_without(condition(timed), leave_out))


def _without(facts: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Leaves out names, also one level down, where the task's own settings are."""
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in facts.items()
        if name not in names
    }


def _has_timed(whole: RunRecord, completed: Sequence[RunRecord]) -> bool:
    return any(purpose(record) == "timed" and _belongs(whole, record) for record in completed)


def _attach(entrant: EntrantRuns, completed: Sequence[RunRecord]) -> None:
    entrant.timed.sort(key=lambda record: float(record.config["started_at"]))
    for record in completed:
        if purpose(record) == "timed" or _entrant(record) != entrant.key or not _belongs(record, entrant.timed[0]):
            continue
        if purpose(record) == "diagnosis":
            entrant.diagnosis = record
        else:
            entrant.whole = record


def _attach_failure(name: str, record: RunRecord, groups: dict[str, dict[str, EntrantRuns]]) -> None:
    """A failed run knows neither data nor settings in force: it joins the group that was asked for the same."""
    backend = _key({part: record.config[part] for part in _OF_A_BACKEND})
    leave_out = set() if purpose(record) == "timed" else {"max_steps", "dropout"}
    wanted = _key(_without(_asked(record), leave_out))
    for entrants in groups.values():
        sample = next((entrant.timed[0] for entrant in entrants.values() if entrant.timed), None)
        if sample is not None and _key(_without(_asked(sample), leave_out)) == wanted:
            fitting = [
                entrant for key, entrant in entrants.items() if json.loads(key)["backend"] == json.loads(backend)
            ]
            if not fitting:
                key = _key({"backend": json.loads(backend)})
                fitting = [entrants.setdefault(key, EntrantRuns(str(record.config["backend"]), key))]
            fitting[0].failures.append(f"{why_unusable(record)} ({name})")
            return


def _place_of(entrant: EntrantRuns) -> tuple[int, str]:
    known = list(BACKENDS)
    name = entrant.name.partition(" ")[0]
    return (known.index(name) if name in known else len(known), entrant.name)


def _number_namesakes(entrants: list[EntrantRuns]) -> None:
    """The same backend in two versions, or with two settings, is two entrants."""
    for name in {entrant.name for entrant in entrants}:
        namesakes = [entrant for entrant in entrants if entrant.name == name]
        for number, entrant in enumerate(namesakes[1:], start=2):
            entrant.name = f"{name} #{number}"


def version(record: RunRecord) -> dict[str, Any]:
    """What tells one entrant from another, in whatever world: the backend, what was asked of it, and all software."""
    environment = record.environment
    variables = {
        name: value
        for name, value in environment.variables.items()
        if not name.endswith(_OF_A_PLACE) and not name.startswith(_OF_A_LAUNCHER)
    }
    return {
        "backend": {name: record.config[name] for name in _OF_A_BACKEND},
        "variables": variables,
        **environment.model_dump(include={"python", "packages", "git_commit", "git_dirty", "cuda", "nccl"}),
    }


def _entrant(record: RunRecord) -> str:
    return _key({**version(record), "in force": record.ranks[0].effective_settings})


def _key(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)
