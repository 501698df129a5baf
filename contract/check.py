"""What a check is: one clause of the contract, the cases it looks at, and how it is judged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from contract.cases import Case

# World sizes that a check may be about.
ANY = range(1, sys.maxsize)
SEVERAL = range(2, sys.maxsize)


class State(str, Enum):
    """How a check may end; no two of these are ever mixed."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    EXPECTED_FAILURE = "expected failure"


class Violation(Exception):
    """The clause does not hold.

    Attributes:
        expected: What the clause demands, in a few words.
        seen: What was observed instead.
        rank: On which rank, None if it is about all of them.
    """

    def __init__(self, expected: str, seen: str, rank: int | None = None) -> None:
        self.expected, self.seen, self.rank = expected, seen, rank
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}expected {expected}, saw {seen}")


class NotSeen(Exception):
    """The suite has no way of seeing what the check is about; the text says why."""


@dataclass(frozen=True)
class Evidence:
    """What one case showed in one group of ranks.

    Attributes:
        adapter: The adapter, as the user named it.
        case: What was done.
        world_size: The number of ranks that were asked for.
        device: "cpu" or "cuda".
        ranks: What each rank observed, in the order of ranks; for a job as a whole, one element.
        memory: What several checks compute from the same evidence; "single" holds what the
            one-process backend did in a case about saved state.
    """

    adapter: str
    case: Case
    world_size: int
    device: str
    ranks: Sequence[Any]
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One clause.

    Attributes:
        id: "C" and two digits.
        title: The clause in a few words, for tables.
        clause: What must be true, in one sentence.
        explanation: How it is checked, and why the check can fail.
        traps: The entries of the trap catalogue that it catches.
        cases: What it looks at: each of these, at each world size it runs at, is judged by itself.
        world_sizes: Those it has something to say about.
        verify: Raises Violation when the evidence of one case breaks the clause.
    """

    id: str
    title: str
    clause: str
    explanation: str
    traps: tuple[str, ...]
    cases: tuple[Case, ...]
    world_sizes: Container[int]
    verify: Callable[[Evidence], None]


_CHECKS: dict[str, Check] = {}


def all_checks() -> dict[str, Check]:
    """Every check by id, in order."""
    import contract.checks  # noqa: F401 (registers them)

    return dict(sorted(_CHECKS.items()))


def check(
    check_id: str, cases: Sequence[Case], *, traps: str = "", world_sizes: Container[int] = ANY
) -> Callable[[Callable[[Evidence], None]], Callable[[Evidence], None]]:
    """Registers a function as the check of the clause that its docstring begins with."""

    def register(verify: Callable[[Evidence], None]) -> Callable[[Evidence], None]:
        assert check_id not in _CHECKS, f"two checks are called {check_id}"
        clause, _, explanation = (verify.__doc__ or "").partition("\n")
        lines = [line.strip() for line in explanation.strip().splitlines()]
        title = verify.__name__.replace("_", " ")
        _CHECKS[check_id] = Check(
            id=check_id,
            title=title,
            clause=clause.strip(),
            explanation="\n".join(lines),
            traps=tuple(traps.split()),
            cases=tuple(cases),
            world_sizes=world_sizes,
            verify=verify,
        )
        return verify

    return register
