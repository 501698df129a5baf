"""Files of images and labels in MNIST's format, for the tests."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tasks.images.drawing import draw
from tasks.images.idx import FILES

TRAIN_IMAGES, TRAIN_LABELS = FILES["train"]
IMAGES, LABELS = FILES["validation"]


def idx(values: np.ndarray) -> bytes:
    """The content of a file, before it is compressed."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def write_files(directory: Path, *, size: int = 28, changes: Mapping[str, bytes | None] | None = None) -> Path:
    """Writes the four files, with 40 and 20 images; a change replaces the content of a file or, if None, removes it."""
    directory.mkdir(parents=True)
    contents: dict[str, bytes | None] = {}
    for names, number in ((FILES["train"], 40), (FILES["validation"], 20)):
        images = draw(number, seed=number)
        contents[names[0]] = gzip.compress(idx(images.pixels[:, :size, :size]))
        contents[names[1]] = gzip.compress(idx(images.labels))
    for name, content in (contents | dict(changes or {})).items():
        if content is not None:
            (directory / name).write_bytes(content)
    return directory
