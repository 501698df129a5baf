"""The promises in the docstrings of backends/interface.py, to which the clauses of the contract point."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from backends import interface


@dataclass(frozen=True)
class Promise:
    """One item of a list in a docstring of the interface.

    Attributes:
        owner: The class or method whose docstring it is; "interface" stands for the module.
        sentence: The item, on one line.
    """

    owner: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.owner}: {self.sentence}"


@functools.cache
def all_promises() -> tuple[Promise, ...]:
    """Reads all promises of the interface, in the order in which they stand there."""
    owners: dict[str, Any] = {"interface": interface}
    for kind in vars(interface).values():
        if not (inspect.isclass(kind) and kind.__module__.startswith("backends.")):
            continue
        owners[kind.__name__] = kind
        methods = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
        owners |= {f"{kind.__name__}.{name}": method for name, method in methods.items()}
    return tuple(Promise(name, sentence) for name, owner in owners.items() for sentence in _items(owner.__doc__ or ""))


def _items(docstring: str) -> list[str]:
    """Returns the items of the lists in a docstring, each on one line."""
    items: list[list[str]] = []
    is_open = False
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("- "):
            items.append([])
        is_open = line.startswith("- ") or (is_open and line.startswith("  "))
        if is_open:
            items[-1].append(line.removeprefix("- ").strip())
    return [" ".join(lines) for lines in items]


def find_promise(quote: str) -> Promise:
    """Returns the promise that is quoted as "OWNER: the beginning of the sentence".

    Args:
        quote: Enough of the sentence to tell it from the owner's other promises.

    Raises:
        LookupError: The interface does not have exactly one such promise.
    """
    found = [promise for promise in all_promises() if str(promise).startswith(quote)]
    if len(found) != 1:
        raise LookupError(f"{quote!r} is the beginning of {len(found)} promises in backends/interface.py; quote one")
    return found[0]
