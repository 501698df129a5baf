"""What a rank sends in a step over a ring, from what its gradients are and from what enters its library.

An all-reduce of S bytes is a reduce-scatter and an all-gather, each of which sends (N-1)/N S
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from records.config import RunConfig

_BYTES_AS = {"fp16": 2, "bf16": 2}


class Payload(NamedTuple):
    """What the ranks of a run have to exchange.

    Attributes:
        gradient_bytes: The size of all gradients of the model.
        gradient_elements: The number of their elements.
        sharded_bytes: The size of all weights, where each rank holds a part of them; 0 where it holds all.
        entered: The bytes that entered the communication library in a step, by operation; empty if nobody has counted.
    """

    gradient_bytes: int
    gradient_elements: int
    sharded_bytes: int = 0
    entered: Mapping[str, int] = MappingProxyType({})


def needed_bytes(config: RunConfig, payload: Payload) -> float:
    """Returns what a rank must send in a step at least, over a ring.

    Where ranks hold parts of weights, a step scatters its gradients once, and gathers the weights for the forward pass
    of each micro-batch and, unless they are kept in between (--no-reshard-after-forward), again for its backward pass.
    It is not known here which weights lie outside of layers, and are always kept in between.
    """
    share = 1 - 1 / config.num_processes
    size = _BYTES_AS.get(config.grad_compression)
    gradients = payload.gradient_bytes if size is None else size * payload.gradient_elements
    decides_by_itself = (
        config.grad_compression == "powersgd" or config.backend_settings.get("embedding_gradients") == "rows"
    )
    if decides_by_itself and payload.entered:
        gradients = sum(payload.entered.values())  # by the shapes of matrices, or by the rows that a step has used
    if not payload.sharded_bytes:
        return 2 * share * gradients
    micro_steps = max(config.gradient_accumulation_steps, 2 if config.batching == "sorted" else 1)
    passes = 1 if config.backend_settings.get("reshard_after_forward") is False else 2
    return share * (gradients + passes * micro_steps * payload.sharded_bytes)


def sent_bytes(entered: Mapping[str, int], num_processes: int) -> float:
    """Returns what each of so many ranks sends over a ring for what has entered the communication library.

    Args:
        entered: Bytes by operation: those of the whole, where ranks hold parts.
        num_processes: The number of ranks.
    """
    passes = sum(_passes(operation) * num_bytes for operation, num_bytes in entered.items())
    return passes * (1 - 1 / num_processes)


def _passes(operation: str) -> int:
    """Returns how often a byte goes around the ring: an all-reduce first scatters sums, then gathers them."""
    return 1 if any(word in operation for word in ("scatter", "gather", "broadcast")) else 2
