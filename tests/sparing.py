"""What continuous integration leaves out to save time; `tests/run.sh --all` runs it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def ring(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns pairs in which each name is once the first and once the second."""
    return list(zip(names, [*names[1:], *names[:1]], strict=True))


def in_ci(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns a parameter for each value, a tuple being several; those that are not kept are exhaustive.

    A test has one for each backend, start method or number of ranks; the kept ones stand for the others where
    these run the same code of ours.

    Raises:
        ValueError: A value is to be kept that is none of them.
    """
    kept, values = list(kept), list(values)
    if strange := [value for value in kept if value not in values]:
        raise ValueError(f"no such values to keep: {strange}")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in kept else [pytest.mark.exhaustive],
        )
        for value in values
    ]
