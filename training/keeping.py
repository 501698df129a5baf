"""Keeping the results of a completed training, wherever there is room for them.

Results for which the directory of the run has no room replace older checkpoints of the run, if that makes enough room.
Otherwise they go into another directory. If none has room, rank 0 waits until somebody makes room or names a directory.
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
from training.writing import WriteProgress
from watch.heartbeat import Heartbeat

# In this file somebody may name a directory to save to. It may also be a link to that directory.
SAVE_TO_NAME = "save-to"
RESCUED_NAME = "rescued"
# How the name of the directory begins in which a model is written, beside its place.
UNFINISHED_MODEL = ".model."
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_ATTEMPTS = 5.0
_SECONDS_BETWEEN_BLIND_ATTEMPTS = 30.0
_SECONDS_BETWEEN_NOTICES = 30.0


class Keeper:
    """Has results written into the directory of the run, or into another one that has room.

    Attributes:
        progress: Is told of what a write has done that changes no size.
        refuge: The other directory into which results were written; None if there is none.
        dropped: The steps of the checkpoints that were removed to make room.
    """

    def __init__(self, directory: Path, heartbeat: Heartbeat, *, spare: int) -> None:
        """Makes a keeper for one run.

        Args:
            directory: The directory of the run.
            heartbeat: Tells the launcher that this rank is alive while it waits.
            spare: The step whose checkpoint has the weights that are to be saved; it is never removed.
        """
        self._directory = directory
        self._heartbeat = heartbeat
        self.progress = WriteProgress(heartbeat)
        self._spare = spare
        self.refuge: Path | None = None
        self.dropped: list[int] = []
        self._told = -math.inf

    def keep(self, what: str, num_bytes: int, write: Callable[[Path], None], *, has_substitute: bool = False) -> Path:
        """Calls `write` with a directory until it succeeds, and returns that directory.

        Args:
            what: What is kept, for messages: "the model".
            num_bytes: About how many bytes it takes.
            write: Writes it into the directory that it is given, completely or not at all.
            has_substitute: Whether the caller can keep something else if `write` fails for another reason than lack
                of room. The caller then gets that error once every directory was tried.

        Raises:
            Exception: The error of `write`, where no other directory can help.
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
        try:
            with self.progress.watched(lambda: place.glob(f"{UNFINISHED_MODEL}*/**/*")):
                write(place)
        except Exception as error:  # a task's code may raise any exception
            with contextlib.suppress(OSError):  # the log may be on the full disk
                print(f"not saved in {place}: {type(error).__name__}: {error}")
            return error
        return None

    def _make_room(self, num_bytes: int) -> bool:
        """Removes the oldest checkpoints of this run, as many as needed.

        The newest one is kept: until the model is saved, nothing else has the trained weights.

        Returns:
            Whether there is enough room now; if not, nothing was removed.
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
        """Yields other directories to try: the refuge, if there is one, and then new directories.

        Directories in memory are left out unless somebody asks for one.
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
        """Returns the directory that somebody has named meanwhile; None if nobody has."""
        path = self._directory / LOGS_NAME / SAVE_TO_NAME
        with contextlib.suppress(OSError, ValueError):
            place = path if path.is_dir() else Path(path.read_text().strip()).expanduser()
            if place.is_absolute() and place.is_dir():
                return place.resolve()
        return None

    def _wait(self, what: str, num_bytes: int, error: Exception) -> None:
        """Waits until another attempt is worthwhile: there is room, or somebody has named another directory."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the user may give up
        began, asked = time.monotonic(), self._asked_place()
        # Where the system says that there is room, as under a quota, nothing shows when another attempt is worthwhile.
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
    """Finds the directory with the record of a run whose own directory no longer exists; None if there is none."""
    for place in (place for parent in _refuges() for place in parent.glob(f"{glob.escape(directory.name)}.*")):
        with contextlib.suppress(OSError, ValueError):
            if read_record(place / RECORD_NAME).config.started_at == started_at:
                return place
    return None


def _refuges() -> tuple[Path, ...]:
    """Returns the directories in which directories for rescued results are made."""
    return cache_directory() / RESCUED_NAME, Path(tempfile.gettempdir())


def _lacks_room(error: Exception) -> bool:
    """Returns whether the disk, or the user's share of it, is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return re.search(r"no space left|disk quota exceeded", str(error), re.IGNORECASE) is not None


def _is_of_the_system(error: Exception) -> bool:
    """Returns whether a user could remedy the error without changing the program.

    safetensors and tokenizers wrap errors of the system in exceptions of their own.
    """
    return isinstance(error, OSError) or _lacks_room(error) or "os error" in str(error)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
