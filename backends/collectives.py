"""The collectives of a library, prepared so that they can be called repeatedly on existing buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Prepared(NamedTuple):
    """A collective that is ready to be called, any number of times.

    Attributes:
        call: Runs it.
        result: The tensor that holds the result afterwards; None where the call returns it.
    """

    call: Callable[[], Any]
    result: torch.Tensor | None = None


Prepare = Callable[[torch.Tensor], Prepared]
"""Takes what this rank contributes, a float32 vector; a collective that works in place changes it."""


def collectives_of_group() -> Mapping[str, Prepare]:
    """Returns the collectives of torch.distributed on its default group; none where there is no group."""
    if not dist.is_initialized():
        return {}
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(values: torch.Tensor) -> Prepared:
        gathered = values.new_empty(world_size * len(values))
        return Prepared(partial(dist.all_gather_into_tensor, gathered, values), gathered)

    def gather(values: torch.Tensor) -> Prepared:
        if rank != 0:
            return Prepared(partial(dist.gather, values, dst=0), values)
        gathered = values.new_empty(world_size * len(values))
        return Prepared(partial(dist.gather, values, list(gathered.chunk(world_size)), dst=0), gathered)

    return {
        "all_reduce": lambda values: Prepared(partial(dist.all_reduce, values), values),
        "all_gather": all_gather,
        "gather": gather,
        "broadcast": lambda values: Prepared(partial(dist.broadcast, values, src=0), values),
    }


def only_all_reduce(all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> Mapping[str, Prepare]:
    """Returns the one collective that every adapter has."""
    return {"all_reduce": lambda values: Prepared(partial(all_reduce, values))}
