"""Options that hold a list: values separated by commas, each of them once."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator

_T = TypeVar("_T")


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError("a value is empty; separate values with single commas")
    return parts


def _without_repetition(values: list[_T]) -> list[_T]:
    return list(dict.fromkeys(values))


def _in_order(values: list[int]) -> list[int]:
    return sorted(set(values))


def _not_empty(name: str) -> str:
    if not name:
        raise ValueError("a name is empty; give names separated by commas")
    return name


CommaList = Annotated[list[_T], BeforeValidator(_split), AfterValidator(_without_repetition)]
"""The values in the order in which the user gives them; a value that comes again is left out."""

Names = CommaList[Annotated[str, AfterValidator(_not_empty)]]

Numbers = Annotated[list[_T], BeforeValidator(_split), AfterValidator(_in_order)]
"""Numbers from the smallest to the largest, each once."""
