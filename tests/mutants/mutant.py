"""What a mutant is, and the table of all mutants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from contract.case import Case

# The adapters that show that the contract catches faults where every rank holds all weights.
REPLICATED = ("ddp", "horovod", "accelerate", "by_hand")

Apply = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault, and the check that must catch it.

    Attributes:
        name: Its name.
        check_id: The check that must fail.
        case: The case whose evidence must show the fault.
        words: A part of what the check says, by adapter; "*" stands for all others.
        apply: A context manager that applies the fault to an adapter.
        harmless_on: The adapters on which it is not a fault, each with the reason.
        stops: The adapters whose training it stops ("*": all), each with words of the error.
        of: The adapters whose fault it is; None where it is one of every adapter under which ranks hold all weights.
        world_size: The number of ranks that show it.
    """

    name: str
    check_id: str
    case: Case
    words: dict[str, str]
    apply: Apply
    harmless_on: dict[str, str]
    stops: dict[str, str]
    of: tuple[str, ...] | None
    world_size: int

    @property
    def mutated_case_name(self) -> str:
        """The name under which a group runs the case with the fault."""
        return f"{self.name}--{self.case.name}"

    def is_fault_of(self, adapter: str) -> bool:
        """Returns whether an adapter with this fault is broken."""
        return (
            (adapter in self.of) if self.of is not None else (adapter in REPLICATED and adapter not in self.harmless_on)
        )

    def words_of(self, adapter: str) -> str:
        """Returns what the check says on this adapter, which may be that the fault stopped the training."""
        return self.words_of_stop(adapter) or self.words.get(adapter, self.words.get("*", ""))

    def words_of_stop(self, adapter: str) -> str | None:
        """Returns words of the error with which it stops the training on this adapter; None if it does not."""
        return self.stops.get(adapter, self.stops.get("*"))


MUTANTS: dict[str, Mutant] = {}


def mutant(
    check_id: str,
    case: Case,
    *,
    words: str | dict[str, str] = "",
    stops: dict[str, str] | None = None,
    of: tuple[str, ...] | None = None,
    world_size: int = 2,
    **harmless_on: str,
) -> Callable[[Apply], Apply]:
    """Registers a generator function as the mutant of its name; the keyword arguments left are `harmless_on`."""

    def register(apply: Apply) -> Apply:
        name = apply.__name__
        by_adapter = words if isinstance(words, dict) else {"*": words}
        facts = (harmless_on, stops or {}, of, world_size)
        MUTANTS[name] = Mutant(name, check_id, case, by_adapter, contextmanager(apply), *facts)
        return apply

    return register


# Reasons for which a mutant is harmless.
BY_HAND_REDUCES = "reduces in step, whatever no_sync says"
HOROVOD_SYNCHRONISES = "synchronize() reduces what the hooks have not"
