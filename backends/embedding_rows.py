"""Gradients of embeddings of which only the rows travel that a step has used.

A step of some hundred tokens looks up as many rows of an embedding, which may have tens of thousands. The gradient of
each other row is zero on all ranks, and so is its average. So the ranks first tell each other which rows have a
gradient, one byte a row, and then average these alone. The average is that of whole gradients. DDP lets its users
replace the reduction of a bucket by a communication hook
(https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from backends.bucket_settings import BucketSettings
from backends.interface import BackendOptions

# So many numbers are looked through at a time, twice: they stay in the second-level cache of a core.
_AT_A_TIME = 131_072


class _Bucket(Protocol):
    """What is used of torch.distributed.GradBucket, whose class torch does not describe for type checkers."""

    def buffer(self) -> torch.Tensor:
        """Returns the gradients in it, one after the other, flat."""

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients as views of the buffer."""

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters that they belong to."""


def send_used_rows(wrapped: DistributedDataParallel, options: BackendOptions) -> None:
    """Has a wrapper send what `--embedding-gradients` says. One rank alone sends nothing.

    Args:
        wrapped: A wrapper that has no hook yet.
        options: What the launcher asked for.
    """
    if not _asks_for_rows(options) or dist.get_world_size() == 1:
        return
    tables = {id(module.weight) for module in wrapped.module.modules() if isinstance(module, torch.nn.Embedding)}
    # A lambda, since torch compares annotations with classes, and ours are strings.
    wrapped.register_comm_hook(None, lambda _, bucket: average(bucket, tables))


def rows_sent_by(wrapped: DistributedDataParallel, options: BackendOptions) -> dict[str, str]:
    """Returns the setting of a wrapper for a record: "rows" if it has the hook; nothing by default.

    Without a group of ranks, some libraries leave the model without a wrapper.
    """
    if not _asks_for_rows(options):
        return {}
    return {"embedding_gradients": "rows" if getattr(wrapped, "_comm_hooks", None) else "whole"}


def average(bucket: _Bucket, tables: set[int]) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, which call this alike for each of their buckets.

    What is not of an embedding comes first, so that it is on its way while rows are looked for.

    Args:
        bucket: Of DDP.
        tables: The identities of those parameters of which only used rows are sent, matrices.

    Returns:
        The buffer of the bucket, once it holds averages. It raises what a reduction raises.
    """
    buffer = bucket.buffer()
    parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
    of_tables = [gradient for parameter, gradient in parts if id(parameter) in tables]
    on_their_way = [_averaged(rest) for rest in _between(of_tables, buffer)]
    if of_tables:
        on_their_way.append(_averaged_rows(of_tables))

    def whole(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> torch.Tensor:
        for one in done.value():
            one.value()  # which raises what has failed
        return buffer

    return torch.futures.collect_all(on_their_way).then(whole)


def used_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Returns for each row of a gradient, a matrix, whether it has an element that is not zero.

    It is a tensor of uint8, which all-reduces take. Twice through a few rows is faster than once through all with a
    function that looks for zeros, or makes absolute values.
    """
    used = torch.empty(len(gradient), dtype=torch.uint8, device=gradient.device)
    num_rows = max(1, _AT_A_TIME // max(1, gradient.shape[1]))
    for rows, found in zip(torch.split(gradient, num_rows), torch.split(used, num_rows), strict=True):
        found.copy_(rows.amax(1).ne(0).logical_or_(rows.amin(1).ne(0)))  # NaN is not zero, either
    return used


def _averaged_rows(gradients: list[torch.Tensor]) -> torch.futures.Future[Any]:
    """Averages gradients of embeddings in place, by those rows that any rank has used."""
    used = torch.cat([used_rows(gradient) for gradient in gradients])
    dist.all_reduce(used, dist.ReduceOp.MAX)
    rows = [found.nonzero().squeeze(1) for found in torch.split_with_sizes(used, [len(one) for one in gradients])]
    message = torch.cat([one.index_select(0, which).view(-1) for one, which in zip(gradients, rows, strict=True)])
    if not message.numel():  # which all ranks find alike
        nothing: torch.futures.Future[Any] = torch.futures.Future()
        nothing.set_result(None)
        return nothing

    def put_back(done: torch.futures.Future[Any]) -> None:
        done.value()  # which raises what has failed
        shapes = [(len(which), gradient.shape[1]) for gradient, which in zip(gradients, rows, strict=True)]
        averages = torch.split_with_sizes(message, [num_rows * num_columns for num_rows, num_columns in shapes])
        for gradient, which, mean, shape in zip(gradients, rows, averages, shapes, strict=True):
            gradient.index_copy_(0, which, mean.view(shape))

    return _averaged(message).then(put_back)


def _averaged(tensor: torch.Tensor) -> torch.futures.Future[Any]:
    """Averages a flat tensor in place: each rank divides its own before they are added up, as DDP does."""
    work = dist.all_reduce(tensor.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return cast(torch.futures.Future[Any], work.get_future())


def _between(of_tables: list[torch.Tensor], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Returns what lies in a buffer before, between and after the gradients of embeddings."""
    start = 0
    for gradient in of_tables:
        place = int(gradient.storage_offset()) - int(buffer.storage_offset())
        if place > start:
            yield buffer[start:place]
        start = place + gradient.numel()
    if start < buffer.numel():
        yield buffer[start:]


def _asks_for_rows(options: BackendOptions) -> bool:
    return isinstance(options.settings, BucketSettings) and options.settings.embedding_gradients == "rows"
