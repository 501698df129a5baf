"""Files of images that are refused, and --sync-batchnorm where nothing could take statistics over ranks."""

from __future__ import annotations

import gzip
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.bad_input.place import Outcome, Place
from tests.idx_files import IMAGES, LABELS, TRAIN_IMAGES, TRAIN_LABELS, idx, write_files

_SMALL = gzip.compress(idx(np.zeros((20, 8, 8))))
_LABELS = np.arange(20) % 10

# id -> (what is changed in the four files, what the message must contain...).
FILE_CASES: dict[str, tuple[dict[str, bytes | None], tuple[str, ...]]] = {
    "missing": ({TRAIN_LABELS: None}, (TRAIN_LABELS, "is missing", f"must hold {TRAIN_IMAGES}")),
    "not-gzip": ({IMAGES: idx(np.zeros((20, 28, 28)))}, (IMAGES, "not compressed with gzip")),
    "cut-off-compressed": ({IMAGES: _SMALL[: len(_SMALL) // 2]}, (IMAGES, "incomplete or damaged")),
    "cut-off-before": (
        {IMAGES: gzip.compress(idx(np.zeros((20, 28, 28)))[:-5])},
        (IMAGES, "should hold 15680 values, but has only 15675"),
    ),
    "cut-off-header": ({LABELS: gzip.compress(b"\0\0\x08\x01\0")}, (LABELS, "incomplete or damaged")),
    "empty": ({LABELS: b""}, (LABELS, "incomplete or damaged")),
    "damaged": ({IMAGES: _SMALL[:12] + b"\xff" + _SMALL[13:]}, (IMAGES, "damaged")),
    "too-long": ({LABELS: gzip.compress(idx(_LABELS) + b"\0")}, (LABELS, "should hold 20 values, but has more")),
    "of-a-size-that-no-file-has": (
        {IMAGES: gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12)},
        (IMAGES, "values, but has only 0"),
    ),
    "labels-as-images": ({IMAGES: gzip.compress(idx(_LABELS))}, (IMAGES, "holds labels", "2049", "a file of images")),
    "images-as-labels": ({LABELS: _SMALL}, (LABELS, "holds images", "2051", "a file of labels")),
    "magic-number": ({IMAGES: gzip.compress(b"PK\x03\x04" + bytes(16))}, (IMAGES, "in another format", "1347093252")),
    "no-image": ({IMAGES: gzip.compress(idx(np.zeros((0, 28, 28))))}, (IMAGES, "0 x 28 x 28 pixels, which is none")),
    "counts": (
        {LABELS: gzip.compress(idx(_LABELS[:19]))},
        (f"{IMAGES} has 20 images, but {LABELS} has 19 labels", "from one data set"),
    ),
    "sizes": ({IMAGES: _SMALL}, (f"{IMAGES} has images of 8 x 8 pixels", f"{TRAIN_IMAGES} have 28 x 28")),
    "label-out-of-range": (
        {LABELS: gzip.compress(idx(np.where(np.arange(20) == 7, 10, _LABELS)))},
        (LABELS, "the label 10 at place 7", "0 to 9"),
    ),
}  # fmt: skip

OPTION_CASES: dict[str, tuple[str, ...]] = {
    "directory-missing": ("--data-dir nowhere", "--data-dir", "nowhere", "there is no such directory"),
    "directory-is-file": ("--data-dir rows.csv", "rows.csv", "is not a directory", TRAIN_IMAGES),
    "preset": ("--model resnet101", "--model resnet101", "'resnet-tiny', 'resnet18', 'resnet34' or 'resnet50'"),
    "number-of-files": ("--data-dir . --num-train-samples 9", "--num-train-samples 9", "leave one of the two out"),
    "no-images": ("--num-train-samples 0", "--num-train-samples 0", "greater than 0"),
    "packed": ("--batching packed", "--batching packed", "the task has no such batches"),
    "sync-batchnorm-packed": ("--sync-batchnorm --batching packed", "--batching packed", "use --batching padded"),
    "sync-batchnorm-compiled": ("--sync-batchnorm --torch-compile", "--torch-compile", "leave out one of the two"),
    "sync-batchnorm-without": (
        "--task token-tagging --sync-batchnorm",
        "--sync-batchnorm",
        "the task token-tagging has a model without BatchNorm",
        "has_batch_norm",
    ),
}


@pytest.mark.parametrize("case", FILE_CASES)
def test_a_file_is_refused(place: Place, lockstep: Callable[..., Outcome], tmp_path: Path, case: str) -> None:
    changes, fragments = FILE_CASES[case]
    directory = write_files(tmp_path / "images", changes=changes)
    with place.untouched():
        outcome = lockstep("ddp", "--task", "image-classification", "--data-dir", str(directory))
        outcome.assert_refused(f"--data-dir {directory}", *fragments)


@pytest.mark.parametrize("case", OPTION_CASES)
def test_an_option_is_refused(place: Place, lockstep: Callable[..., Outcome], case: str) -> None:
    arguments, *fragments = OPTION_CASES[case]
    task = "" if "--task" in arguments else "--task image-classification"
    with place.untouched():
        lockstep(*shlex.split(f"ddp {task} {arguments}")).assert_refused(*fragments)
