"""How the checks of an adapter ended, each over all of its cases and numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.interface import KnownFailure
from contract.check import Check, State, all_checks
from contract.suite import Result


@dataclass(frozen=True)
class Verdict:
    """How one check ended over all its instances.

    Attributes:
        check: The check.
        state: The worst of its instances' states; passed if some passed and the others could not run.
        results: The results of its instances.
        reason: Why, unless all instances passed.
        causes: What other checks may have failed of alike; empty if the check has a reason of its own.
    """

    check: Check
    state: State
    results: tuple[Result, ...]
    reason: str
    causes: frozenset[str] = frozenset()


_WORST_FIRST = (State.FAILED, State.NOT_RUN, State.EXPECTED_FAILURE, State.PASSED, State.UNSUPPORTED, State.UNAVAILABLE)


def summarise(results: Sequence[Result], known: dict[str, KnownFailure], *, is_whole: bool = True) -> list[Verdict]:
    """Sums up results by check.

    Args:
        results: The results of instances.
        known: The clauses that the adapter declares to fail, by id.
        is_whole: Whether all cases were run; then a check that passes although it is declared to fail has failed.
    """
    verdicts = []
    for check in all_checks().values():
        mine = tuple(result for result in results if result.instance.check is check)
        if not mine:
            continue
        state = next(state for state in _WORST_FIRST if any(result.state is state for result in mine))
        # What fails may only show where this machine cannot run it.
        ran = not any(result.state is State.UNAVAILABLE for result in mine)
        if is_whole and ran and state is State.PASSED and check.id in known:
            state, reason = (
                State.FAILED,
                f"declared to fail ({known[check.id].reason}), but it passes: remove it from known_failures",
            )
        else:
            reason = _reason(mine, state)
        causes = frozenset(result.cause for result in mine if result.state is state)
        verdicts.append(Verdict(check, state, mine, reason, causes if all(causes) else frozenset()))
    return verdicts


def _reason(results: tuple[Result, ...], state: State) -> str:
    """Returns the first reason of a result that decided, or where a check that passed could not run."""
    if state is State.PASSED:
        return "; ".join(_gap(results, missing) for missing in (State.UNSUPPORTED, State.UNAVAILABLE)).strip("; ")
    deciding = [result for result in results if result.state is state]
    first = deciding[0]
    if state in (State.UNSUPPORTED, State.UNAVAILABLE):
        return first.reason
    where = f"{first.instance.case.name} at {_ranks(first.instance.world_size)}"
    more = f" (and in {len(deciding) - 1} more)" if len(deciding) > 1 else ""
    return f"{where}: {first.reason}{more}" + (f" [{first.link}]" if first.link else "")


def _gap(results: tuple[Result, ...], missing: State) -> str:
    """Returns the precisions and world sizes, or else the cases, where a check that passed elsewhere is `missing`."""
    passed = [result.instance for result in results if result.state is State.PASSED]
    left = [result.instance for result in results if result.state is missing]
    sizes = {instance.world_size for instance in left} - {instance.world_size for instance in passed}
    precisions = {instance.case.precision for instance in left} - {instance.case.precision for instance in passed}
    compressions = {one.case.grad_compression for one in left} - {one.case.grad_compression for one in passed}
    compressed = (f"{compression} gradients" for compression in sorted(compressions))
    gaps = [*sorted(precisions), *compressed, *(_ranks(size) for size in sorted(sizes))]
    gaps = gaps or sorted({one.case.name for one in left})
    return f"{missing.value}: {', '.join(gaps)}" if left else ""


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
