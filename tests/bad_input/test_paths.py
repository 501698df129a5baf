"""Paths to read and to write that are refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from tests.bad_input.files import LONG_NAME, train_on, validate_on
from tests.bad_input.place import Outcome, Place

# id -> (arguments of lockstep, what the message must contain...).
PATH_CASES: dict[str, tuple[str, ...]] = {
    "output-holds-run": ("ddp --output-dir run", "--output-dir run", "already holds a run", "--overwrite"),
    "output-holds-files-named-alike": ("ddp --output-dir not-ours --overwrite", "not-ours", "holds no run"),
    "output-holds-other-files": ("ddp --output-dir foreign", "--output-dir foreign", "no run; choose another"),
    "output-holds-other-files-overwrite": ("ddp --output-dir foreign --overwrite", "foreign", "choose another"),
    "output-is-working-directory": ("ddp --output-dir . --overwrite", "--output-dir .", "choose another directory"),
    "output-is-file": ("ddp --output-dir rows.csv --overwrite", "--output-dir rows.csv", "name a directory"),
    "output-below-file": ("ddp --output-dir rows.csv/a/b", "rows.csv is a file", "choose another directory"),
    "output-name-too-long": (f"ddp --output-dir {LONG_NAME}", LONG_NAME, "name too long"),
    "overwrite-but-option-is-bad": ("ddp --output-dir run --overwrite --seed x", "--seed x", "valid integer"),
    "overwrite-but-data-are-bad": (f"{train_on('no-text.csv')} --output-dir run --overwrite", "has no text"),
    "overwrite-would-remove-model": (
        "ddp --output-dir run --overwrite --model run",
        "--overwrite would remove --model",
        "choose another --output-dir",
    ),
    "overwrite-would-remove-data": (
        f"{validate_on('run/run.json')} --output-dir run --overwrite",
        "--overwrite would remove --validation-file",
        "choose another --output-dir",
    ),
    "output-holds-file-in-the-way": (
        "ddp --output-dir mixed --overwrite",
        "--output-dir mixed: holds config.json, which no run wrote",
        "move it away",
    ),
    "home-of-output": ("ddp --output-dir=~/foreign", "{home}/foreign", "no run; choose another"),
    "home-of-data": ("single --train-file=~/no.csv --validation-file=~/no.csv", "{home}/no.csv", "no such file"),
    "home-of-resume": ("ddp --resume=~/nowhere", "{home}/nowhere", "no such file"),
    "home-of-report": ("report '~/nowhere.json'", "{home}/nowhere.json", "cannot be read"),
    "home-of-race": ("compare --config=~/nowhere.yaml", "{home}/nowhere.yaml", "No such file"),
    "home-of-collectives": ("allreduce --output=~/rows.csv", "{home}/rows.csv", "exists already"),
    "home-of-contract": ("contract ddp --json=~/rows.csv", "{home}/rows.csv", "exists already"),
    "output-empty": ("ddp --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-race": ("compare --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-report": ("report rows.csv --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-collectives": ("allreduce --output=", "--output: is empty", "name a path"),
    "output-empty-contract": ("contract ddp --json=", "--json: is empty", "name a path"),
    "output-too-long-contract": (f"contract ddp --json {LONG_NAME}", LONG_NAME, "name too long"),
    "output-not-text": ("ddp --output-dir=a\udcff", "bytes that are not UTF-8"),
    "output-is-link-to-nowhere": ("ddp --output-dir dangling", "--output-dir dangling", "a path that does not exist"),
    "output-is-circle-of-links": ("ddp --output-dir circle", "--output-dir circle", "a path that does not exist"),
    "output-below-circle": ("ddp --output-dir circle/a", "circle", "is a link to a path that does not exist"),
    "output-in-proc": ("single --task token-tagging --output-dir /proc/run", "/proc/run", "choose another path"),
    "record-name-too-long": (f"report {LONG_NAME}", LONG_NAME, "name too long"),
    "report-name-too-long": (f"report rows.csv --output-dir {LONG_NAME}", LONG_NAME, "name too long"),
    "report-target-nan": ("report rows.csv --target-accuracy nan", "--target-accuracy nan", "finite number"),
    "report-target-percent": ("report rows.csv --target-accuracy 90", "--target-accuracy 90", "or equal to 1"),
    "record-not-text": ("report 'a\udcff'", "bytes that are not UTF-8"),
}


@pytest.mark.parametrize("case", PATH_CASES)
def test_path_is_refused(place: Place, lockstep: Callable[..., Outcome], case: str) -> None:
    arguments, *fragments = PATH_CASES[case]
    with place.untouched():
        outcome = lockstep(*shlex.split(arguments))
        outcome.assert_refused(*(fragment.replace("{home}", str(place.work)) for fragment in fragments))
