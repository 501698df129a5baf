"""What ``--profile`` and ``--record`` name: a profile, or the record of a run that holds enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forecast.profile import PROFILE_NAME, PROFILE_VERSIONS, Profile
from forecast.records import LacksTimes, profile_of_record
from launch.errors import UsageError, one_line
from records.names import RECORD_NAME
from records.record import read_record

_MOST_BYTES = 100_000_000
_HOW = "launch/run.sh forecast profile makes a profile"


def read_source(option: str, path: Path) -> Profile:
    """Reads a profile, or makes one of the record of a run, as far as the record goes.

    Args:
        option: The option that names the path, for messages.
        path: A profile, a record, or a directory with one of them.

    Raises:
        UsageError: It is none of these, or has not what a forecast needs.
    """
    asked = f"{option} {path}"
    try:
        if path.is_dir():
            path = _file_in(asked, path)
        content = _content(asked, path)
    except OSError as error:
        raise UsageError(f"{asked}: cannot be read ({error.strerror}); {_HOW}") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UsageError(f"{asked}: is neither a profile nor the record of a run; {_HOW}")
    return _read(asked, content) if "kind" in content else _from_record(asked, path)


def _file_in(asked: str, directory: Path) -> Path:
    for name in (PROFILE_NAME, RECORD_NAME):
        if (directory / name).exists():
            return directory / name
    raise UsageError(f"{asked}: holds no {PROFILE_NAME} and no {RECORD_NAME}; {_HOW}")


def _content(asked: str, path: Path) -> Any:
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{asked}: is larger than any profile; name another file")
    text = path.read_bytes()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{asked}: is not JSON; {_HOW}") from error


def _read(asked: str, content: dict[str, Any]) -> Profile:
    if content["kind"] != Profile.model_fields["kind"].default:
        raise UsageError(f"{asked}: is of the kind '{one_line(content['kind'])[:60]}', no profile; {_HOW}")
    if content["schema_version"] not in PROFILE_VERSIONS:
        raise UsageError(
            f"{asked}: has schema version {one_line(content['schema_version'])[:20]}, and this Lockstep reads versions "
            f"{' and '.join(map(str, PROFILE_VERSIONS))}; make the profile again (launch/run.sh forecast profile)"
        )
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{asked}: {where}: {first['msg']}; {_HOW}") from error


def _from_record(asked: str, path: Path) -> Profile:
    try:
        return profile_of_record(read_record(path))
    except LacksTimes as error:
        raise UsageError(f"{asked}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{asked}: is no record of this Lockstep; {_HOW}") from error
