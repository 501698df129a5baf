"""Which files of a directory a run has written, so that replacing the run removes these and no others."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from records.config import RunConfig
from records.files import write_atomically
from records.names import (
    ATTEMPTS_NAME,
    CHECKPOINTS_NAME,
    CONFIG_NAME,
    LOGS_NAME,
    MODEL_FILES_NAME,
    PROGRESS_NAME,
    RECORD_NAME,
    TRACES_NAME,
)
from records.record import read_record
from records.tracker import TRACKERS
from tasks.interface import Task
from tasks.registry import TASKS, load_task

_FILES = (CONFIG_NAME, RECORD_NAME, PROGRESS_NAME, MODEL_FILES_NAME)
_CHECKPOINT = r"step-\d{8,}\.safetensors"
_UNFINISHED_BY_SAFETENSORS = r"\.tmp[A-Za-z0-9]{6}"
_RANK_FILE = r"rank\d+\.(log|pid|error\.json|done|heartbeat|stacks|sigterm|reserve)"
# torch.profiler adds .tmp to the name of a file that it has not finished.
_TRACE = r"rank\d+(\.backend)?\.json(\.gz)?|\.rank\d+\.json\.\d+\.tmp"
_UNFINISHED_MODEL = r"\.model\.[a-z0-9_]{8}"
# The files in the directory of a run, by folder; an unfinished file has a dot and a number after its name.
_NAMES = {
    "": "|".join(re.escape(name) for name in _FILES),
    LOGS_NAME: rf"{_RANK_FILE}|starter\.log|stop|stopped|stop-agreed|notice|save-to",
    CHECKPOINTS_NAME: rf"{_CHECKPOINT}|{_UNFINISHED_BY_SAFETENSORS}",
    TRACES_NAME: _TRACE,
    **dict.fromkeys(TRACKERS, r"events\.out\.tfevents\..+"),
}
_TORCHRUN_FILE = r"(stdout|stderr)\.log|error\.json"


def model_files(directory: Path) -> set[str]:
    """Returns the names of the model's files that a run has saved here, relative to the directory."""
    try:
        names = json.loads((directory / MODEL_FILES_NAME).read_bytes())
    except (OSError, ValueError):
        return _model_files_of_old_run(directory)
    paths = [PurePosixPath(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    # The list may be damaged or forged: names outside the directory are ignored.
    return {str(path) for path in paths if not path.is_absolute() and ".." not in path.parts}


def note_model_files(directory: Path, names: list[str]) -> None:
    """Adds names to the list of the model's files."""
    write_atomically(directory / MODEL_FILES_NAME, json.dumps(sorted({*names, *model_files(directory)})))


def _model_files_of_old_run(directory: Path) -> set[str]:
    """Returns the model's files of a run without such a list: if it is complete, those that its task declares."""
    try:
        record = read_record(directory / RECORD_NAME)
    except (OSError, ValueError):
        return set()
    name = record.config.task
    patterns = load_task(name).model_files if name in TASKS else Task.model_files
    return set(_matching(directory, patterns)) if record.status == "completed" else set()


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if any(fnmatch(path.name, pattern) for pattern in patterns))


def files_of_run(directory: Path) -> Iterator[Path]:
    """Yields every file in a run's directory that a run wrote; it does not follow links to folders."""
    yield from _files_of_attempt(directory)
    attempts = [] if (directory / ATTEMPTS_NAME).is_symlink() else _entries(directory / ATTEMPTS_NAME, r"\d+")
    for attempt in (path for path in attempts if not path.is_symlink()):
        yield from _files_of_attempt(attempt)
        yield from _entries(attempt, _CHECKPOINT)
    for name in model_files(directory):
        path = directory / name
        if path.is_file() and path.parent.resolve().is_relative_to(directory.resolve()):
            yield path
    for folder in _entries(directory, _UNFINISHED_MODEL):
        yield from (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _files_of_attempt(directory: Path) -> Iterator[Path]:
    for folder, names in _NAMES.items():
        if folder and (directory / folder).is_symlink():
            continue
        found = _entries(directory / folder, rf"{names}|\.({names})\.\d+")
        yield from (path for path in found if path.is_symlink() or not path.is_dir())
    torchrun = directory / LOGS_NAME / "torchrun"
    for path in sorted(torchrun.rglob("*")) if not (torchrun.is_symlink() or torchrun.parent.is_symlink()) else ():
        if re.fullmatch(_TORCHRUN_FILE, path.name) and path.is_file():
            yield path


def _entries(directory: Path, pattern: str) -> list[Path]:
    """Returns the paths in a directory whose names match; none if there is no such directory."""
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if re.fullmatch(pattern, path.name))
    return []


def remove_run(directory: Path) -> None:
    """Removes the files that a run wrote, and the folders that are empty then."""
    written = list(files_of_run(directory))
    folders = {folder for path in written for folder in path.parents if directory in folder.parents}
    made = [LOGS_NAME, CHECKPOINTS_NAME, TRACES_NAME, ATTEMPTS_NAME, *TRACKERS]
    folders |= {directory / name for name in made}
    folders |= {path for path in (directory / LOGS_NAME / "torchrun").rglob("*") if path.is_dir()}
    folders |= {directory / LOGS_NAME / "torchrun", *_entries(directory, _UNFINISHED_MODEL)}
    # The files that mark the directory as that of a run go last, so that an interrupted removal can be repeated.
    last = [directory / MODEL_FILES_NAME, directory / CONFIG_NAME]
    for path in sorted(written, key=lambda path: last.index(path) + 1 if path in last else 0):
        path.unlink(missing_ok=True)
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # not there, not empty, or a link
            folder.rmdir()


def other_files(directory: Path) -> list[str]:
    """Returns the names of the files in a run's directory that no run wrote, relative to it."""
    written = set(files_of_run(directory))
    found = (path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [str(path.relative_to(directory)) for path in found if path not in written]


def names_in_the_way(directory: Path, patterns: tuple[str, ...]) -> list[str]:
    """Returns the names of files in a directory that no run wrote and that a new run would overwrite.

    Args:
        directory: The directory.
        patterns: What the files of the model will be called.
    """
    known = model_files(directory)
    taken = [name for name in _matching(directory, patterns) if name not in known]
    taken += [name for name in _FILES if (directory / name).is_dir()]
    return taken + [
        name for name in _NAMES if name and os.path.lexists(directory / name) and not (directory / name).is_dir()
    ]


def linked_folders(directory: Path) -> list[str]:
    """Returns the names of a run's folders that are links."""
    return [name for name in (ATTEMPTS_NAME, *filter(None, _NAMES)) if (directory / name).is_symlink()]


def holds_run(directory: Path) -> bool:
    """Returns whether a run wrote this directory; other programs may also have a file run.json."""
    try:
        RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return True
