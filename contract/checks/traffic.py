"""What crosses between ranks, counted where it enters the communication library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contract.cases import HALF, PLAIN
from contract.check import SEVERAL, Evidence, NotSeen, Violation, check
from contract.checks.judging import config_of, reference_of

# DDP, for one, agrees on its buckets in the second step.
_STEPS_TO_SETTLE = 2


def _steps(evidence: Evidence) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every (rank, step, observation)."""
    travelled = {where for (seen,) in evidence.ranks for step in seen["steps"] for where, _, _ in step["traffic"]}
    if not travelled - {"loop"}:
        # That they do travel is another clause.
        raise NotSeen(
            "its gradients pass neither through torch.distributed nor through Horovod in the thread of the training, "
            "where they are counted"
        )
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            yield rank, number, step


@check("C25", [*PLAIN, *HALF], traps="A8 C2 P1 P5 P11", world_sizes=SEVERAL)
def every_gradient_is_reduced_once(evidence: Evidence) -> None:
    """Every gradient element is reduced exactly once an optimizer step, whatever the accumulation.

    Elements are counted where they enter torch.distributed (in C++ too) or Horovod, and compared
    with the number of trainable elements: a flag or a norm that travels beside them is one too many.
    """
    for rank, number, step in _steps(evidence):
        expected = evidence.ranks[rank][0]["setup"]["trainable_elements"]
        reduced = sum(
            size
            for where, operation, size in step["traffic"]
            if (where.startswith("backward") or where == "step") and operation != "broadcast"
        )
        if reduced != expected:
            raise Violation(f"{expected} elements to be reduced in step {number}", str(reduced), rank)


@check(
    "C26",
    [case for case in (*PLAIN, *HALF) if case.trainings[0].accumulation > 1],
    traps="P1 A3 A4 A8",
    world_sizes=SEVERAL,
)
def micro_batches_before_the_last_stay_local(evidence: Evidence) -> None:
    """Under `no_sync` nothing is reduced: that belongs to the last micro-batch of a window, or to `step`."""
    for rank, number, step in _steps(evidence):
        last = len(step["micro_batches"]) - 1
        early = [
            f"{size} elements in {where}"
            for where, _, size in step["traffic"]
            if where.startswith("backward") and int(where.split()[1]) < last
        ]
        if early:
            raise Violation(f"silence before the last micro-batch of step {number}", ", ".join(early)[:200], rank)


@check("C27", PLAIN, traps="H8 P2 P4", world_sizes=SEVERAL)
def nothing_else_is_communicated(evidence: Evidence) -> None:
    """Between two reports of the loss, ranks exchange gradients and nothing else: no buffers, no barrier, no flags.

    Every small collective costs a latency, and buffers broadcast in a forward deadlock a rank that
    runs one alone. The first two steps are left to a library for arranging itself.
    """
    config = config_of(evidence)
    batches = reference_of(evidence).batches
    epoch_ends = [number for number, batch in enumerate(batches, start=1) if len(batch) < config.global_batch_size]
    for rank, number, step in _steps(evidence):
        if number <= _STEPS_TO_SETTLE:
            continue
        reports = number % config.logging_steps == 0 or number in epoch_ends
        evaluates = number - 1 in epoch_ends
        others = [
            f"{operation} of {size} in {where}"
            for where, operation, size in step["traffic"]
            if (where == "loop" and not (reports or evaluates))
            or (where != "loop" and operation in ("barrier", "broadcast"))
            or where.startswith(("forward", "between"))
        ]
        if others:
            raise Violation(f"gradients alone to travel in step {number}", ", ".join(others)[:200], rank)
