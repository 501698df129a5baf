"""A message from rank 0 to its launcher that needs no free disk space: a file of fixed size, written in place."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from records.names import LOGS_NAME, RECORD_NAME

_NUM_BYTES = 8192
_MAX_CHARACTERS = 1500


class Notice(NamedTuple):
    """A text of rank 0, and the directory of results that did not fit into the run's own directory."""

    text: str = ""
    refuge: Path | None = None


def prepare_notice(run_directory: Path) -> None:
    """Reserves the space while there is some."""
    _path(run_directory).write_bytes(b" " * _NUM_BYTES)


def give_notice(run_directory: Path, notice: Notice) -> None:
    """Sends a notice to the launcher, also on a full disk; if the run's directory is gone or read-only, it is lost."""
    refuge = str(notice.refuge) if notice.refuge is not None else None
    content = json.dumps({"text": notice.text[:_MAX_CHARACTERS], "refuge": refuge}).encode()
    with contextlib.suppress(OSError), _path(run_directory).open("r+b") as file:
        file.write(content.ljust(_NUM_BYTES)[:_NUM_BYTES])


def read_notice(run_directory: Path) -> Notice:
    """Returns the last notice of rank 0; an empty one if there is none."""
    try:
        content = json.loads(_path(run_directory).read_bytes())
        return Notice(str(content["text"]), Path(content["refuge"]) if content["refuge"] else None)
    except (OSError, ValueError, KeyError, TypeError):
        return Notice()


def record_directory(run_directory: Path) -> Path | None:
    """Returns the directory of a run's record: the run's own or the one with free space; None if there is no record."""
    places = (run_directory, read_notice(run_directory).refuge)
    return next((place for place in places if place is not None and (place / RECORD_NAME).exists()), None)


def _path(run_directory: Path) -> Path:
    return run_directory / LOGS_NAME / "notice"
