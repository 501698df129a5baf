"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path


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
