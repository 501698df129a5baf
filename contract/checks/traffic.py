"""What ranks send each other, counted where it enters the communication library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from contract.cases import ADAMW, ADAMW_CLIPPED, BITS, CLIPPED, HALF, LAYERED, MOMENTUM, PLAIN, UNCLIPPED, VARIED
from contract.check import SEVERAL, Evidence, NotSeen, Violation, check
from contract.checks.judging import config_of
from contract.reference import global_batches

# With clipping and optimizer state, too, which ranks have in common and need not send; over a hundred steps; and with
# an embedding of which a step uses a few rows.
_TRAFFIC = (*PLAIN, LAYERED, *CLIPPED, UNCLIPPED, MOMENTUM, ADAMW, ADAMW_CLIPPED, BITS, VARIED)
# DDP, for example, settles its buckets in the second step.
_STEPS_TO_SETTLE = 2


def _steps(evidence: Evidence) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every (rank, step, observation)."""
    places = {where for (seen,) in evidence.ranks for step in seen["steps"] for where, *_ in step["traffic"]}
    if not places - {"loop"}:
        # That gradients are reduced at all is another clause.
        raise NotSeen(
            "communication is counted where it enters torch.distributed or Horovod in the thread of the training, and "
            "this adapter's gradients do not enter there"
        )
    for rank, (seen,) in enumerate(evidence.ranks):
        for number, step in enumerate(seen["steps"], start=1):
            yield rank, number, step


def _sends_used_rows(settings: str) -> bool:
    # What is not JSON is another clause.
    return settings.startswith("{") and json.loads(settings).get("embedding_gradients") == "rows"


def _with_used_rows(setup: dict[str, Any], step: dict[str, Any]) -> tuple[int, int]:
    """Returns the least and the most elements of a step that sends used rows of embeddings, and one for each row."""
    least = most = setup["trainable_elements"]
    for name in setup["embeddings"]:
        num_rows, num_columns = setup["weights_after"][name].shape
        most += num_rows
        # A step that was skipped shows no gradients: any number of rows may have been used.
        num_used = int(step["gradients"][name].ne(0).any(1).sum()) if step["gradients"] else 0
        least += num_rows - (num_rows - num_used) * num_columns
        if step["gradients"]:
            most -= (num_rows - num_used) * num_columns
    return least, most


def _gathers(operation: str) -> bool:
    return "gather" in operation


@check(
    "C25",
    [*_TRAFFIC, *HALF],
    traps="A8 C2 P1 P5 P11",
    world_sizes=SEVERAL,
    promises=["Backend.step: Every gradient element is reduced exactly once"],
)
def every_gradient_is_reduced_once(evidence: Evidence) -> None:
    """Every gradient element is reduced exactly once in an optimizer step, however many micro-batches it has.

    Elements are counted where they enter torch.distributed (from C++, too) or Horovod, and compared with the number of
    trainable elements: a flag or a norm that is reduced along with them is one element too many, and averaged optimizer
    state is many. Where each rank holds
    a part of each weight, the rows of a gradient may be filled up so that all parts are equally large, the norm takes
    one element more, and gathering weights is no reduction. Where each rank holds all weights and a part of the
    optimizer state, the same is true of the norm and of gathering, and no rank updates more than its part. An adapter
    that sends only the used rows of embeddings, as `embedding_gradients` of its settings says with the value "rows",
    may send one element besides for each row.
    """
    for rank, number, step in _steps(evidence):
        setup = evidence.ranks[rank][0]["setup"]
        least = most = setup["trainable_elements"]
        is_sharded = setup["shards_weights"] or setup["shards_optimizer"]
        if setup["shards_weights"]:
            most = setup["padded_elements"] + 1
            part = setup["padded_weights"] // evidence.world_size
            if setup["held_weights"] > part:
                raise Violation(f"at most {part} elements of weights on each rank", str(setup["held_weights"]), rank)
        elif setup["shards_optimizer"]:
            most = least + 1
            part = setup["flat_elements"] // evidence.world_size
            if setup["updated_elements"] > part:
                raise Violation(f"at most {part} elements updated by each rank", str(setup["updated_elements"]), rank)
        elif _sends_used_rows(evidence.ranks[rank][0]["settings"]):
            least, most = _with_used_rows(setup, step)
        reduced = sum(
            size
            for where, operation, size, _ in step["traffic"]
            if (where.startswith("backward") or where == "step")
            and ("reduce" in operation if is_sharded else operation != "broadcast")
        )
        if not least <= reduced <= most:
            expected = f"{least} to {most}" if least < most else str(least)
            raise Violation(f"{expected} elements to be reduced in step {number}", str(reduced), rank)


@check(
    "C26",
    [case for case in (*_TRAFFIC, *HALF) if case.trainings[0].accumulation > 1],
    traps="P1 A3 A4 A8",
    world_sizes=SEVERAL,
    promises=["Backend.no_sync: Inside, no gradient is reduced"],
)
def micro_batches_before_the_last_stay_local(evidence: Evidence) -> None:
    """No gradient is reduced under `no_sync`: that is left to the last micro-batch of a step, or to `step`."""
    for rank, number, step in _steps(evidence):
        last = len(step["micro_batches"]) - 1
        gathers_weights = evidence.ranks[rank][0]["setup"]["shards_weights"]
        early = [
            f"{size} elements in {where}"
            for where, operation, size, _ in step["traffic"]
            if where.startswith("backward")
            and int(where.split()[1]) < last
            and not (gathers_weights and _gathers(operation))
        ]
        if early:
            raise Violation(f"no reduction before the last micro-batch of step {number}", ", ".join(early)[:200], rank)


@check(
    "C27",
    _TRAFFIC,
    traps="H8 P2 P4",
    world_sizes=SEVERAL,
    promises=["interface: Between consecutive reports of the loss"],
)
def nothing_else_is_communicated(evidence: Evidence) -> None:
    """Between consecutive reports of the loss, ranks exchange gradients and nothing else.

    Buffers, barriers and flags are not allowed: every small collective costs a latency, and a rank that runs a forward
    pass alone would wait for ever for the others to broadcast buffers. The first two steps are exempt, since libraries
    arrange their buckets in them. Where each rank holds a part of each weight, the weights are gathered at most twice
    in each micro-batch: for its forward and for its backward pass. Where each rank holds all weights and updates a
    part of them, they are gathered at most once, in `step`.
    """
    config = config_of(evidence)
    assert config.logging_steps is not None
    batches = [batch for epoch in global_batches(config) for batch in epoch]
    epoch_ends = [number for number, batch in enumerate(batches, start=1) if len(batch) < config.global_batch_size]
    for rank, number, step in _steps(evidence):
        if number <= _STEPS_TO_SETTLE:
            continue
        setup = evidence.ranks[rank][0]["setup"]
        gathered = sum(size for where, operation, size, _ in step["traffic"] if where != "loop" and _gathers(operation))
        most = 2 * setup["padded_weights"] * len(step["micro_batches"]) if setup["shards_weights"] else 0
        if setup["shards_optimizer"]:
            most = setup["flat_elements"]
        if gathered > most:
            raise Violation(f"at most {most} elements of weights to be gathered in step {number}", str(gathered), rank)
        reports = number % config.logging_steps == 0 or number in epoch_ends
        evaluates = number - 1 in epoch_ends
        others = [
            f"{operation} of {size} in {where}"
            for where, operation, size, _ in step["traffic"]
            if (where == "loop" and not (reports or evaluates))
            or (where != "loop" and operation in ("barrier", "broadcast"))
            or (where.startswith(("forward", "between")) and not (setup["shards_weights"] and _gathers(operation)))
            or (setup["shards_weights"] and where != "loop" and not ("reduce" in operation or _gathers(operation)))
            or (setup["shards_optimizer"] and where.startswith("backward") and "reduce" not in operation)
        ]
        if others:
            raise Violation(f"only gradients to be communicated in step {number}", ", ".join(others)[:200], rank)
