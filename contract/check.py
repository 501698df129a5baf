"""What a check is: one clause of the contract, the cases whose evidence it judges, and how it judges them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from contract.case import Case

# World sizes that a check may apply to.
ANY = range(1, sys.maxsize)
SEVERAL = range(2, sys.maxsize)


class State(str, Enum):
    """How a check may end."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    EXPECTED_FAILURE = "expected failure"


class Violation(Exception):
    """A clause does not hold.

    Attributes:
        expected: What the clause demands, in a few words.
        seen: What was observed instead.
        rank: The rank on which it was observed, or None if all ranks are concerned.
        cause: What several clauses may fail of alike, such as a case that did not complete; empty otherwise.
    """

    def __init__(self, expected: str, seen: str, rank: int | None = None, *, cause: str = "") -> None:
        self.expected, self.seen, self.rank, self.cause = expected, seen, rank, cause
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}expected {expected}, saw {seen}")


class NotRun(Exception):
    """The case that is to be judged never ran; the message says why."""


class NotSeen(Exception):
    """The suite cannot observe what the check is about; the message says why."""


@dataclass(frozen=True)
class Evidence:
    """What was observed of one case in one group of ranks.

    Attributes:
        adapter: The adapter, as the user named it.
        case: The case.
        world_size: The number of ranks that were asked for.
        device: "cpu" or "cuda".
        ranks: What each rank observed, in the order of ranks; for a job as a whole, one element.
        memory: What several checks compute from the same evidence; "alone" holds what the
            single-process backend did in a case about saved state.
        float64: Whether the adapter can average float64; otherwise, the case ran in float32.
    """

    adapter: str
    case: Case
    world_size: int
    device: str
    ranks: Sequence[Any]
    memory: dict[str, Any] = field(default_factory=dict)
    float64: bool = True


@dataclass(frozen=True)
class Check:
    """One clause.

    Attributes:
        id: "C" and two digits.
        title: The clause in a few words, for tables.
        clause: What must be true, in one sentence.
        explanation: How it is checked, and what makes it fail.
        promises: The promises of the interface that it is about, as quotes for `find_promise`.
        traps: The entries of the trap catalogue that it catches.
        cases: The cases that it judges, each by itself and at each world size.
        world_sizes: The world sizes that it applies to.
        verify: Raises a Violation if the evidence of one case breaks the clause.
    """

    id: str
    title: str
    clause: str
    explanation: str
    promises: tuple[str, ...]
    traps: tuple[str, ...]
    cases: tuple[Case, ...]
    world_sizes: Container[int]
    verify: Callable[[Evidence], None]


_CHECKS: dict[str, Check] = {}


def all_checks() -> dict[str, Check]:
    """Returns all checks by id, in order."""
    import contract.checks  # noqa: F401 (registers them)

    return dict(sorted(_CHECKS.items()))


def check(
    check_id: str,
    cases: Sequence[Case],
    *,
    promises: Sequence[str],
    traps: str = "",
    world_sizes: Container[int] = ANY,
) -> Callable[[Callable[[Evidence], None]], Callable[[Evidence], None]]:
    """Registers a function as the check of the clause that is the first sentence of its docstring."""

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
            promises=tuple(promises),
            traps=tuple(traps.split()),
            cases=tuple(cases),
            world_sizes=world_sizes,
            verify=verify,
        )
        return verify

    return register
