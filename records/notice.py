"""A word of rank 0 to its launcher that needs no room on the disk: a file of a fixed size, written in place."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from records.names import LOGS_NAME, RECORD_NAME

_NUM_BYTES = 8192
_MAX_CHARACTERS = 1500


class Notice(NamedTuple):
    """What rank 0 has to say, and in which directory results lie that found no room in the run's own."""

    text: str = ""
    refuge: Path | None = None


def prepare_notice(run_directory: Path) -> None:
    """Takes the room while there is some."""
    _path(run_directory).write_bytes(b" " * _NUM_BYTES)


def give_notice(run_directory: Path, notice: Notice) -> None:
    """Tells the launcher, also on a full disk; where the run's directory has gone or cannot be written to, nobody."""
    refuge = str(notice.refuge) if notice.refuge is not None else None
    content = json.dumps({"text": notice.text[:_MAX_CHARACTERS], "refuge": refuge}).encode()
    with contextlib.suppress(OSError), _path(run_directory).open("r+b") as file:
        file.write(content.ljust(_NUM_BYTES)[:_NUM_BYTES])


def read_notice(run_directory: Path) -> Notice:
    """What rank 0 said last; an empty notice if nothing."""
    try:
        content = json.loads(_path(run_directory).read_bytes())
        return Notice(str(content["text"]), Path(content["refuge"]) if content["refuge"] else None)
    except (OSError, ValueError, KeyError, TypeError):
        return Notice()


def record_directory(run_directory: Path) -> Path | None:
    """Where the record of a run is: in its own directory, or where rank 0 found room; None if there is none."""
    places = (run_directory, read_notice(run_directory).refuge)
    return next((place for place in places if place is not None and (place / RECORD_NAME).exists()), None)


def _path(run_directory: Path) -> Path:
    return run_directory / LOGS_NAME / "notice"
