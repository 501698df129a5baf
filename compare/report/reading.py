"""Reading what a report is made of: records of runs with what races wrote beside them, and results of collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from compare.collectives.measurement import read_collectives
from compare.report.machines import describe_machine
from compare.report.runs import RaceFacts, Run, race_file
from compare.results import RESULTS_NAME, CollectiveSeries, Results, read_results
from launch.errors import UsageError
from records.names import RECORD_NAME
from records.record import RunRecord, read_record

PLAN_NAME = "plan.json"
_MAX_FILE_BYTES = 256 * 2**20

_Kind = Literal["record", "race", "collectives", "results", "plan"]
# What may be given instead of a path that cannot be used.
GIVE = "records of runs (record.json), the directory of a race, or a results.json"
# How the content of a file without a field that says so is recognised.
_FIELDS: dict[_Kind, set[str]] = {"results": {"groups", "verdict"}, "plan": {"entrants", "schedule"}}
_PAGES = (".html", ".md", ".csv")


_NAMES: dict[_Kind, str] = {
    "record": "the record of a run",
    "race": "what a race keeps beside a record",
    "collectives": "what the benchmark of collectives measured",
    "results": "results",
    "plan": "the plan of a race",
}


class Inputs(NamedTuple):
    """What the files of a report hold."""

    runs: list[Run]
    collectives: list[CollectiveSeries]


def read_run(path: Path) -> Run:
    """Reads the record of a run, and what a race wrote beside it.

    Raises:
        OSError, ValueError: One of them cannot be read.
    """
    beside = race_file(path)
    race = RaceFacts.model_validate_json(beside.read_bytes()) if beside.exists() else None
    return Run(str(path), read_record(path), race)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Reads records of runs and results of collectives.

    What a race wrote beside a record is read with the record, whether or not it is among the paths.

    Raises:
        UsageError: A file is neither, or was written by another version; the text names it.
    """
    inputs = Inputs([], [])
    records = {race_file(path): path for path in paths}
    for path in paths:
        kind = kind_of(path)
        if kind == "race" and path not in records:
            raise UsageError(f"{path}: is what a race keeps beside a record; also pass the record it belongs to")
        if kind == "plan":
            raise UsageError(f"{path}: is the plan of a race; give its directory, {path.parent}")
        if kind == "results":
            raise UsageError(
                f"{path}: holds the results of a report, which cannot be put together with other files; give it alone, "
                "or the records that it was made of"
            )
        try:
            if kind == "collectives":
                inputs.collectives.extend(_series(path))
            elif kind == "record":
                inputs.runs.append(read_run(path))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: is not a valid {kind} file ({_first_line(error)}); leave it out") from error
    _refuse_repetitions(inputs.runs)
    return inputs


def _series(path: Path) -> list[CollectiveSeries]:
    measured = read_collectives(path)
    machine = describe_machine(measured.environment, [])
    where = {"machine": machine, "network": measured.network}
    return [series.model_copy(update=where) for series in measured.series]


def _refuse_repetitions(runs: Iterable[Run]) -> None:
    seen: dict[str, str] = {}
    for run in runs:
        digest = hashlib.sha256(run.record.model_dump_json().encode()).hexdigest()
        if digest in seen:
            raise UsageError(f"{run.name}: is the same run as {seen[digest]}; give each record once")
        seen[digest] = run.name


def read_results_file(path: Path) -> Results:
    """Reads a results.json.

    Raises:
        UsageError: It is none, or was written by another version; the text says what it is.
    """
    kind = kind_of(path)
    if kind != "results":
        raise UsageError(f"{path}: holds no results but {_NAMES[kind]}; give the results.json of a race or a report")
    try:
        return read_results(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: is not a results.json of this version ({_first_line(error)}); make it again from its records, "
            "with launch/run.sh report"
        ) from error


def kind_of(path: Path) -> _Kind:
    """Tells what a file holds before it is read as a whole.

    Raises:
        UsageError: It is nothing that a report is made of; the text says what was found, and what to give.
    """
    content = _content(path)
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UsageError(f"{path}: is neither the record of a run nor results; leave it out, or give {GIVE}")
    kinds: tuple[_Kind, ...] = ("race", "collectives")
    found = [kind for kind in kinds if content.get("kind") == kind]
    found += [kind for kind, fields in _FIELDS.items() if fields <= content.keys()]
    if found:
        return found[0]
    wanted = RunRecord.model_fields["schema_version"].default
    if content["schema_version"] != wanted:
        version = str(content["schema_version"])[:40]
        raise UsageError(
            f"{path}: is a record of schema version {version}, but this program reads version {wanted}; "
            "repeat the run with this version"
        )
    return "record"


def _content(path: Path) -> Any:
    """Reads a file of JSON.

    Raises:
        UsageError: It cannot be read, or is something else.
    """
    if path.is_dir():
        raise UsageError(f"{path}: {_found_in(path)}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is not a file; give {GIVE}")
    if path.exists() and path.stat().st_size > _MAX_FILE_BYTES:
        raise UsageError(f"{path}: is larger than any record ({path.stat().st_size} bytes); leave it out")
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give {GIVE}") from error
    except (ValueError, RecursionError) as error:
        if path.suffix in _PAGES:
            raise UsageError(f"{path}: is a page, not what a report is made of; give {GIVE}") from error
        raise UsageError(f"{path}: is not JSON ({_first_line(error)}); it may be incomplete") from error


def _found_in(directory: Path) -> str:
    """Says what a directory holds that is not the directory of a race, and what to give instead."""
    if (directory / RECORD_NAME).exists():
        return f"is the directory of a run; give its record, {directory / RECORD_NAME}"
    if (directory / RESULTS_NAME).exists():
        return f"is the directory of a report; give {directory / RESULTS_NAME}, or the records that it was made of"
    if (directory.parent / PLAN_NAME).exists():
        return f"belongs to a race; give the directory of the race, {directory.parent}"
    if any(directory.glob("*.json")):
        return f"is a directory without a race; give the files in it: {directory}/*.json"
    return f"is a directory that holds no race, no run and no report; give {GIVE}"


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):  # its text has a line for each error
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
    return " ".join(str(error).split())[:200]
