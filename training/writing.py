"""Signs of life while files are written: a slow disk is no hang, and a write that stands still is one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from watch.heartbeat import Heartbeat

_SECONDS_BETWEEN_LOOKS = 1.0


class _Seen(NamedTuple):
    """What can be seen of a write from beside it."""

    num_parts: int
    size: int
    num_blocks: int  # safetensors makes a file as large as it will be, and then fills it


class WriteProgress:
    """Tells the launcher that this rank is alive as long as a write goes on, however long it takes.

    Args:
        heartbeat: The heartbeat of this rank.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._num_parts = 0

    def note(self) -> None:
        """Notes a part of the work that changes no size; the thread that writes calls it."""
        self._num_parts += 1

    @contextlib.contextmanager
    def watched(self, unfinished: Callable[[], Iterable[Path]]) -> Iterator[None]:
        """Writes a heartbeat at first, and then about once in a second if something was written inside meanwhile.

        Args:
            unfinished: Finds the files that are being written.
        """
        is_over, first = threading.Event(), self._look(unfinished)
        self._heartbeat.enter("saving")

        def watch() -> None:
            before = first
            while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
                if (now := self._look(unfinished)) != before:
                    before = now
                    self._heartbeat.enter("saving")

        watcher = threading.Thread(target=watch, name="write-watcher", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def _look(self, unfinished: Callable[[], Iterable[Path]]) -> _Seen:
        sizes = []
        with contextlib.suppress(OSError):
            for path in unfinished():
                with contextlib.suppress(OSError):  # it may just have been moved to its place
                    facts = path.stat()
                    sizes.append((facts.st_size, facts.st_blocks))
        return _Seen(self._num_parts, sum(size for size, _ in sizes), sum(blocks for _, blocks in sizes))
