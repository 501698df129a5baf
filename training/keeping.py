"""Keeping the results of a training that is over, wherever there is room for them.

What finds no room in the run's directory makes some, by removing older checkpoints of the run where that is enough;
or it goes into another directory; or it waits until somebody makes room or names a directory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import math
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from records.checkpoint import checkpoint_step, list_checkpoints
from records.names import LOGS_NAME, RECORD_NAME
from records.notice import Notice, give_notice
from records.record import read_record
from tasks.cache import cache_directory
from training.room import MIB, free_bytes, is_in_memory
from watch.heartbeat import Heartbeat

# Where somebody may name a directory to save to: a file with its name, or a link to it.
SAVE_TO_NAME = "save-to"
RESCUED_NAME = "rescued"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_ATTEMPTS = 5.0
_SECONDS_BETWEEN_BLIND_ATTEMPTS = 30.0
_SECONDS_BETWEEN_NOTICES = 30.0


class Keeper:
    """Has things written into the run's directory, or where there is room.

    Attributes:
        refuge: The other directory that something has gone to, if any has.
        dropped: The steps of the checkpoints that were removed to make room.
    """

    def __init__(self, directory: Path, heartbeat: Heartbeat, *, spare: int) -> None:
        """Keeps in `directory`; the checkpoint of the step `spare` holds the weights to be saved, and stays."""
        self._directory = directory
        self._heartbeat = heartbeat
        self._spare = spare
        self.refuge: Path | None = None
        self.dropped: list[int] = []
        self._told = -math.inf

    def keep(self, what: str, num_bytes: int, write: Callable[[Path], None], *, has_substitute: bool = False) -> Path:
        """Calls `write` with a directory until it succeeds, and returns that directory.

        Args:
            what: What is kept, for messages: "the model".
            num_bytes: About how much room it takes.
            write: Writes it into the directory it is given, whole or not at all.
            has_substitute: Whether the caller has something else to keep if `write` fails for another reason
                than lack of room: then the caller gets that error once every directory was tried.

        Raises:
            Exception: That of `write`, where no other directory can help.
        """
        while True:
            error = self._attempt(write, self._directory)
            if error is not None and _lacks_room(error) and self._make_room(num_bytes):
                error = self._attempt(write, self._directory)
            if error is None:
                return self._directory
            errors = [error]
            for place in self._other_places():
                if (failure := self._attempt(write, place)) is None:
                    self.refuge = place
                    text = f"{what} could NOT be saved in {self._directory} ({_short(error)}): it is in {place}"
                    give_notice(self._directory, Notice(text, place))
                    return place
                errors.append(failure)
                if place != self.refuge:
                    shutil.rmtree(place, ignore_errors=True)
            other = next((one for one in errors if not _lacks_room(one)), None)
            if other is not None and (has_substitute or not _is_of_the_system(other)):
                raise other
            self._wait(what, num_bytes, error)

    def _attempt(self, write: Callable[[Path], None], place: Path) -> Exception | None:
        self._heartbeat.enter("saving")
        try:
            write(place)
        except Exception as error:  # a task's own code may raise anything
            with contextlib.suppress(OSError):  # the log may lie on the full disk
                print(f"not saved in {place}: {type(error).__name__}: {error}")
            return error
        return None

    def _make_room(self, num_bytes: int) -> bool:
        """Removes this run's oldest checkpoints, as many as needed; none, and False, if that would not be enough.

        The newest one stays: until the model is saved, nothing else holds what was trained.
        """
        spare = [path for path in list_checkpoints(self._directory)[1:] if checkpoint_step(path) != self._spare]
        missing = num_bytes - free_bytes(self._directory)
        if missing <= 0 or sum(path.stat().st_size for path in spare) < missing:
            return False
        while free_bytes(self._directory) < num_bytes and spare:
            path = spare.pop()
            path.unlink(missing_ok=True)
            self.dropped.append(checkpoint_step(path))
        return True

    def _other_places(self) -> Iterator[Path]:
        """Directories to try, each a new one but for that which has taken something already.

        What lies in memory alone is no place to keep anything, unless somebody asks for it.
        """
        if self.refuge is not None:
            yield self.refuge
        asked = self._asked_place()
        parents = [asked] if asked is not None else []
        for parent in (*parents, *_refuges()):
            with contextlib.suppress(OSError):
                if parent != asked:
                    parent.mkdir(parents=True, exist_ok=True)
                    if is_in_memory(parent):
                        continue
                yield Path(tempfile.mkdtemp(prefix=f"{self._directory.name}.", dir=parent))

    def _asked_place(self) -> Path | None:
        """The directory that somebody has named meanwhile."""
        path = self._directory / LOGS_NAME / SAVE_TO_NAME
        with contextlib.suppress(OSError, ValueError):
            place = path if path.is_dir() else Path(path.read_text().strip()).expanduser()
            if place.is_absolute() and place.is_dir():
                return place.resolve()
        return None

    def _wait(self, what: str, num_bytes: int, error: Exception) -> None:
        """Returns when it is worth another attempt: there is room, or another directory was named."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever wants to give up may
        began, asked = time.monotonic(), self._asked_place()
        # Where there is room by the system's word, as under a quota, nothing shows when another attempt is worth it.
        has_room = free_bytes(self._directory) >= num_bytes
        pause = _SECONDS_BETWEEN_BLIND_ATTEMPTS if has_room else _SECONDS_BETWEEN_ATTEMPTS
        while True:
            self._heartbeat.enter("saving")
            now = time.monotonic()
            if now - self._told >= _SECONDS_BETWEEN_NOTICES:
                self._told = now
                give_notice(self._directory, Notice(self._plea(what, num_bytes, error), self.refuge))
            if self._asked_place() != asked:
                return
            if now - began >= pause and free_bytes(self._directory) >= num_bytes:
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _plea(self, what: str, num_bytes: int, error: Exception) -> str:
        kept = list_checkpoints(self._directory)
        lost = f"what was trained after step {checkpoint_step(kept[0])}" if kept else "the whole training"
        missing = max(1, -(-(num_bytes - free_bytes(self._directory)) // MIB))
        remedy = f"free {missing} MiB in" if _lacks_room(error) else "mend this for"
        return (
            f"{time.strftime('%H:%M:%S')}: {what} is NOT saved yet ({_short(error)}): {remedy} "
            f"{self._directory}, or name a directory with room in the file {LOGS_NAME}/{SAVE_TO_NAME} there (or link "
            f"it to that directory); Ctrl-C twice gives up, and {lost} is lost"
        )


def find_rescued(directory: Path, started_at: float) -> Path | None:
    """Finds where the record of a run is whose directory has gone; None if it was not kept."""
    for place in (place for parent in _refuges() for place in parent.glob(f"{glob.escape(directory.name)}.*")):
        with contextlib.suppress(OSError, ValueError):
            if read_record(place / RECORD_NAME).config.started_at == started_at:
                return place
    return None


def _refuges() -> tuple[Path, ...]:
    """The directories in which new ones are made for what finds no room where it belongs."""
    return cache_directory() / RESCUED_NAME, Path(tempfile.gettempdir())


def _lacks_room(error: Exception) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return re.search(r"no space left|disk quota exceeded", str(error), re.IGNORECASE) is not None


def _is_of_the_system(error: Exception) -> bool:
    """Whether somebody could heal it without another program; safetensors and tokenizers have errors of their own."""
    return isinstance(error, OSError) or _lacks_room(error) or "os error" in str(error)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
