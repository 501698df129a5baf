"""Reading what a report is made of: records of runs with what races wrote beside them, and results of collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from compare.collectives.measurement import read_collectives
from compare.report.runs import RaceFacts, Run, race_file
from compare.results import CollectiveSeries
from launch.errors import UsageError
from records.record import RunRecord, read_record

_MAX_FILE_BYTES = 256 * 2**20

_Kind = Literal["record", "race", "collectives"]


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
        kind = _kind(path)
        if kind == "race" and path not in records:
            raise UsageError(f"{path}: is what a race keeps beside a record; also pass the record it belongs to")
        try:
            if kind == "collectives":
                inputs.collectives.extend(read_collectives(path).series)
            elif kind == "record":
                inputs.runs.append(read_run(path))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: is not a valid {kind} file ({_first_line(error)}); leave it out") from error
    _refuse_repetitions(inputs.runs)
    return inputs


def _refuse_repetitions(runs: Iterable[Run]) -> None:
    seen: dict[str, str] = {}
    for run in runs:
        digest = hashlib.sha256(run.record.model_dump_json().encode()).hexdigest()
        if digest in seen:
            raise UsageError(f"{run.name}: is the same run as {seen[digest]}; give each record once")
        seen[digest] = run.name


def _kind(path: Path) -> _Kind:
    """Tells what a file holds before it is read as a whole."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is not a file; name a record.json")
    if path.exists() and path.stat().st_size > _MAX_FILE_BYTES:
        raise UsageError(f"{path}: is larger than any record ({path.stat().st_size} bytes); leave it out")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name a record.json") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({_first_line(error)}); it may be incomplete") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UsageError(f"{path}: is neither the record of a run nor the results of collectives; leave it out")
    for kind in ("race", "collectives"):
        if content.get("kind") == kind:
            return kind
    wanted = RunRecord.model_fields["schema_version"].default
    if content["schema_version"] != wanted:
        version = str(content["schema_version"])[:40]
        raise UsageError(
            f"{path}: is a record of schema version {version}, but this program reads version {wanted}; "
            "repeat the run with this version"
        )
    return "record"


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):  # its text has a line for each error
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
    return " ".join(str(error).split())[:200]
