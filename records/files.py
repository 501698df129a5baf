"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# How much of a file is written to the disk at once.
_PIECE_BYTES = 16 * 1024 * 1024
# Of sync_file_range(2): wait for what is being written by now, write the rest, and wait for that.
_WRITE_AND_WAIT = 1 | 2 | 4


def write_atomically(target: Path, content: str | bytes) -> None:
    """Replaces a file by one rename, after its content has reached the disk."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def sync_file(path: Path, progressed: Callable[[], None] = lambda: None) -> None:
    """Makes the system write a file to the disk, and returns when it is there.

    Args:
        path: The file.
        progressed: Called for each piece that has been written, as far as the system can write pieces. A large file
            takes minutes on a slow disk, in which fsync(2) alone would not show whether it goes on.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("rb+") as file:
        _write_pieces(path, progressed)
        os.fsync(file.fileno())


def _write_pieces(path: Path, progressed: Callable[[], None]) -> None:
    """Has the system write a file piece by piece, until it refuses to.

    An error is left to the caller: each opening of a file is told of it once, and so is the caller's.
    """
    import ctypes

    write = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if write is None:  # only Linux has it
        return
    write.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    with path.open("rb") as file:
        for begin in range(0, os.fstat(file.fileno()).st_size, _PIECE_BYTES):
            if write(file.fileno(), begin, _PIECE_BYTES, _WRITE_AND_WAIT) != 0:
                return
            progressed()
