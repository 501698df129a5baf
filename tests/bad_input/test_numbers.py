"""Every numeric option refuses what is no number, too small, too large, or not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.bad_input.place import Outcome, Place

# option -> (backend and task, a value too small, one too large)
INTEGERS = {
    "num-processes": ("ddp", "0", "1048577"),
    "threads-per-rank": ("ddp", "0", "1025"),
    "master-port": ("ddp", "0", "65536"),
    "global-batch-size": ("ddp", "0", "1000000001"),
    "micro-batch-size": ("ddp", "0", "1000000001"),
    "eval-batch-size": ("ddp", "0", "1000000001"),
    "num-train-epochs": ("ddp", "0", "1000000001"),
    "max-steps": ("ddp", "0", "1000000001"),
    "logging-steps": ("ddp", "0", "1000000001"),
    "dataloader-num-workers": ("ddp", "-1", "1025"),
    "trace": ("ddp", "-1", "101"),
    "seed": ("ddp", "-1", "4294967296"),
    "max-seq-length": ("ddp", "3", "513"),
    "num-train-samples": ("ddp --task token-tagging", "0", "1000001"),
    "num-validation-samples": ("ddp --task token-tagging", "0", "1000001"),
    "hidden-size": ("ddp --task token-tagging", "0", "4097"),
}
FLOATS = {
    "bucket-cap-mb": ("ddp", "0.001", "100001"),
    "timeout": ("ddp", "0", "1000001"),
    "max-grad-norm": ("ddp", "-0.5", "1e39"),
    "init-loss-scale": ("ddp", "0", "1e39"),
    "learning-rate": ("ddp", "0", "1e39"),
    "warmup-ratio": ("ddp", "-0.5", "1.01"),
    "weight-decay": ("ddp", "-0.5", "1e39"),
    "dropout": ("ddp", "-0.5", "1"),
    "momentum": ("ddp --optimizer sgd", "-0.5", "1"),
}
REMEDY = {
    ("max-steps", "0"): "give a positive number, or -1",
    ("max-steps", "-2"): "give a positive number, or -1",
    ("max-seq-length", "513"): "choose 512 or less",
}


def _number_cases() -> Iterator[tuple[str, str, str, str]]:
    """Yields (backend and task, option, value, remedy)."""
    huge = 40 * "9"
    for numbers, kind, beyond in ((INTEGERS, "valid integer", "valid integer"), (FLOATS, "valid number", "finite")):
        for option, (command, too_small, too_large) in numbers.items():
            values = {"many": kind, "": kind, "1,5": kind, "nan": beyond, "inf": beyond, "-inf": beyond}
            if numbers is INTEGERS:
                values["1.5"] = kind
            values |= {too_small: "greater than", "-2": "greater than", too_large: "less than", huge: "less than"}
            for value, remedy in values.items():
                overridden = REMEDY.get((option, "513" if (option, value) == ("max-seq-length", huge) else value))
                yield command, option, value, overridden or remedy


@pytest.mark.parametrize(
    ("command", "option", "value", "remedy"),
    [pytest.param(*case, id=f"{case[1]}={case[2]}") for case in _number_cases()],
)
def test_number_is_refused(
    command: str,
    option: str,
    value: str,
    remedy: str,
    place: Place,
    lockstep: Callable[..., Outcome],
) -> None:
    with place.untouched():
        lockstep(*command.split(), f"--{option}={value}").assert_refused(f"--{option} {value}", remedy)
