"""What the tensors of a rank hold, part by part, and what a rank saves that holds parts of weights."""

from __future__ import annotations

from collections.abc import Sequence

from compare.report.page import Cell, Row, Table, measured
from compare.report.tables import mark
from compare.results import Entrant, GroupResult

_MIB = 1 / 2**20
# A rank that holds no more than this share of another's weights holds a part of them, and not the same ones rounded up.
_A_PART = 0.75
# What is saved matters if it is this share of the other's memory.
_MATTERS = 0.1


def memory_table(result: GroupResult) -> Table:
    """Returns what the rank that holds most holds under each backend of a group."""
    columns = ["backend", "parameters (MiB)", "gradients (MiB)", "optimizer state (MiB)", "activations (MiB)"]
    columns += ["buffers (MiB)", "memory of a rank at most (MiB)"]
    rows = [
        Row(
            [
                Cell(entrant.name),
                measured(entrant.memory.parameters, _MIB),
                measured(entrant.memory.gradients, _MIB),
                measured(entrant.memory.optimizer, _MIB),
                measured(entrant.memory.activations, _MIB),
                measured(entrant.memory.buffers, _MIB),
                measured(_most(entrant), _MIB),
            ],
            mark(entrant),
        )
        for entrant in result.entrants
        if entrant.memory
    ]
    return Table(f"What the tensors of a rank hold, {result.group.key}", columns, rows).without_empty_columns()


def savings(groups: Sequence[GroupResult]) -> list[str]:
    """Says what each rank saves under a backend that shards weights, once for each, where that matters."""
    said: dict[str, str] = {}
    for result in groups:
        for entrant in result.entrants:
            other = next((one for one in result.entrants if _saves(entrant, one)), None)
            if other is not None and entrant.memory and other.memory:
                mine, theirs = (f"{one.memory.between_steps * _MIB:.0f}" for one in (entrant, other) if one.memory)
                said.setdefault(
                    entrant.name,
                    f"{entrant.name} shards weights: each rank holds {mine} MiB of weights, gradients and optimizer "
                    f"state, where one of {other.name} holds {theirs} MiB.",
                )
    return list(said.values())


def _saves(entrant: Entrant, other: Entrant) -> bool:
    """Tells whether a rank of an entrant holds a part of what a rank of another holds, and saves much by that."""
    if not (entrant.ranked and other.ranked and entrant.memory and other.memory):
        return False
    saved = other.memory.between_steps - entrant.memory.between_steps
    return entrant.memory.parameters <= _A_PART * other.memory.parameters and saved >= _MATTERS * (_most(other) or 0)


def _most(entrant: Entrant) -> int | None:
    return entrant.peak_cuda_memory_bytes or entrant.peak_memory_bytes
