"""Files of images and labels in the format of MNIST, and what is refused of them.

A file begins with a magic number, whose last byte is the number of dimensions, and a 32-bit size for each of these,
all in big-endian order; then come the values, a byte each. LeCun, Cortes and Burges described the format with MNIST
(http://yann.lecun.com/exdb/mnist/); FashionMNIST has it, too (https://github.com/zalandoresearch/fashion-mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.images.drawing import Images
from tasks.interface import Split, TaskInputError

# FashionMNIST's and MNIST's.
NUM_CLASSES = 10
FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "validation": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
_KINDS = {0x0803: "images", 0x0801: "labels"}
_REMEDY = "download the file again"
# Deflate makes nothing smaller than a 1032nd (https://zlib.net/zlib_tech.html).
_MOST_COMPRESSION = 1032


def read_images(directory: Path) -> dict[Split, Images]:
    """Reads the four files of a directory.

    Args:
        directory: It holds FILES.

    Returns:
        The images of each split, all of one size.

    Raises:
        TaskInputError: A file is missing, damaged or another one than its name says, or two do not fit together.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "there is no such directory"
        raise TaskInputError(f"--data-dir {directory}: {what}; name the one that holds {FILES['train'][0]}")
    splits = {split: _split(directory, *names) for split, names in FILES.items()}
    sizes = {split: images.pixels.shape[1:] for split, images in splits.items()}
    if sizes["train"] != sizes["validation"]:
        height, width = sizes["validation"]
        raise TaskInputError(
            f"--data-dir {directory}: {FILES['validation'][0]} has images of {height} x {width} pixels, those of "
            f"{FILES['train'][0]} have {sizes['train'][0]} x {sizes['train'][1]}; take all files from one data set"
        )
    return splits


def _split(directory: Path, images_name: str, labels_name: str) -> Images:
    pixels, labels = _values(directory / images_name, "images"), _values(directory / labels_name, "labels")
    if not pixels.size:
        raise TaskInputError(
            f"--data-dir {directory}: {images_name} has {' x '.join(map(str, pixels.shape))} pixels, which is none; "
            f"{_REMEDY}"
        )
    if len(pixels) != len(labels):
        raise TaskInputError(
            f"--data-dir {directory}: {images_name} has {len(pixels)} images, but {labels_name} has {len(labels)} "
            "labels; take both files from one data set"
        )
    outside = np.flatnonzero(labels >= NUM_CLASSES)
    if len(outside):
        raise TaskInputError(
            f"--data-dir {directory}: {labels_name} has the label {labels[outside[0]]} at place {outside[0]}; "
            f"labels are 0 to {NUM_CLASSES - 1}, so number the classes anew"
        )
    return Images(pixels, labels.astype(np.int64))


def _values(path: Path, wanted: str) -> npt.NDArray[np.uint8]:
    """Reads the values of one file, in its shape."""
    where = f"--data-dir {path.parent}: {path.name}"
    if not path.exists():
        raise TaskInputError(f"{where} is missing; the directory must hold {', '.join(sum(FILES.values(), ()))}")
    try:
        with gzip.open(path) as file:
            (magic,) = struct.unpack(">I", file.read(4))
            if _KINDS.get(magic) != wanted:
                found = f"holds {_KINDS[magic]}" if magic in _KINDS else "is in another format"
                raise TaskInputError(
                    f"{where} {found} (its magic number is {magic}); it must be a file of {wanted} in MNIST's format"
                )
            num_dimensions = magic & 0xFF
            shape = struct.unpack(f">{num_dimensions}I", file.read(4 * num_dimensions))
            size = math.prod(shape)
            # A size that the file cannot have would take as much memory.
            content = file.read(min(size, _MOST_COMPRESSION * path.stat().st_size) + 1)
    except gzip.BadGzipFile as error:
        raise TaskInputError(f"{where} is not compressed with gzip, or damaged ({error}); {_REMEDY}") from error
    except (EOFError, struct.error, zlib.error) as error:
        raise TaskInputError(f"{where} is incomplete or damaged ({error}); {_REMEDY}") from error
    except OSError as error:
        raise TaskInputError(f"{where} cannot be read ({error.strerror})") from error
    if len(content) != size:
        more = "more" if len(content) > size else f"only {len(content)}"
        raise TaskInputError(f"{where} should hold {size} values, but has {more}; {_REMEDY}")
    return np.frombuffer(content, np.uint8).reshape(shape)
