"""Gradients of the ranks of one node, averaged through memory that they share.

gloo sends gradients through TCP, also to a rank on the same node: the kernel copies each byte twice. Here each rank
writes its bucket where the others can read it. DDP lets its users replace the reduction of a bucket by a communication
hook (https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).

No file has a name, so that nothing is left of a rank that is killed: ranks open each other's through /proc, as
memfd_create(2) describes.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from array import array
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from backends.traffic import Count

# Where a bucket begins, so that no two share a line of a cache.
_ALIGNMENT = 64
# A signal is the number of the rank that sends it, of 16 bits: a pipe takes so few bytes whole, and gives them so.
_SIGNAL = "H"


class Bucket(Protocol):
    """What is used of torch.distributed.GradBucket, whose class torch does not describe for type checkers."""

    def index(self) -> int:
        """Returns the number of the bucket in its step, from 0."""

    def buffer(self) -> torch.Tensor:
        """Returns the gradients in it, one after the other, flat."""

    def is_last(self) -> bool:
        """Returns whether no other follows in this step."""


class SharedGradients:
    """Averages buckets over all ranks, which are processes of one node. All methods are collective.

    Memory holds two copies of the gradients of each rank, for odd and even steps. A rank that begins the next step but
    one has got the signals of all others in the step between, and these send none before they have read all of the
    step before.

    Attributes:
        count: What counts the elements that are averaged, while anybody wants to know.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, timeout_seconds: float) -> None:
        """Shares memory with the other ranks of the default group.

        Args:
            parameters: Whose gradients will be averaged.
            timeout_seconds: How long to wait for another rank.

        Raises:
            OSError: There is not enough memory, or the system forbids to share it.
        """
        self.count: Count | None = None
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._timeout_seconds = timeout_seconds
        num_bytes = sum(_aligned(one.numel() * one.element_size()) for one in parameters if one.requires_grad)
        self._copies = [[torch.empty(0)] * self._world_size for _ in range(2)]
        self._inbox, own_outbox = os.pipe()
        own_memory = os.memfd_create("gradients")
        os.posix_fallocate(own_memory, 0, 2 * num_bytes)
        places = torch.zeros(self._world_size, 3, dtype=torch.int64)
        places[self._rank] = torch.tensor([os.getpid(), own_memory, own_outbox])
        dist.all_reduce(places)
        self._outboxes: list[int] = []
        for rank, (process, memory, outbox) in enumerate(places.tolist()):
            opened = os.open(f"/proc/{process}/fd/{memory}", os.O_RDWR)
            content = torch.frombuffer(mmap.mmap(opened, 2 * num_bytes), dtype=torch.uint8)
            os.close(opened)
            for copies, half in zip(self._copies, content.chunk(2), strict=True):
                copies[rank] = half
            if rank != self._rank:
                self._outboxes.append(os.open(f"/proc/{process}/fd/{outbox}", os.O_WRONLY))
        dist.barrier()
        os.close(own_memory)
        os.close(own_outbox)
        self._signals = [0] * self._world_size
        self._num_sent = self._parity = self._offset = 0
        self._waiting: list[tuple[torch.Tensor, int, torch.futures.Future[torch.Tensor]]] = []

    def average(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Takes a bucket; those of a step come in the same order on all ranks, and the last one completes them all."""
        buffer = bucket.buffer()
        if self.count is not None:
            self.count("shared_memory", buffer.numel(), buffer.nbytes)
        if bucket.index() == 0:
            self._offset, self._parity = 0, 1 - self._parity
        torch.div(buffer, self._world_size, out=self._part(self._rank, self._offset, buffer))
        # A write is a barrier to the processor: whoever reads the signal finds what was written before it.
        for outbox in self._outboxes:
            os.write(outbox, array(_SIGNAL, [self._rank]))
        self._num_sent += 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting.append((buffer, self._offset, done))
        self._offset += _aligned(buffer.numel() * buffer.element_size())
        if bucket.is_last():
            self._complete()
        return done

    def close(self) -> None:
        """Gives the memory back."""
        self._copies.clear()
        for descriptor in (self._inbox, *self._outboxes):
            os.close(descriptor)

    def _complete(self) -> None:
        """Sums what all ranks have written, bucket by bucket, in the order of ranks, so that all get the same bits."""
        before = self._num_sent - len(self._waiting)
        for number, (buffer, offset, done) in enumerate(self._waiting, start=before + 1):
            self._wait(number)
            if self._world_size == 2:  # the sum of two numbers is the same in either order, and a half is exact
                other = self._part(1 - self._rank, offset, buffer)
                torch.add(other, buffer, alpha=0.5, out=buffer)
            else:
                buffer.copy_(self._part(0, offset, buffer))
                for rank in range(1, self._world_size):
                    buffer.add_(self._part(rank, offset, buffer))
            done.set_result(buffer)
        self._waiting.clear()

    def _wait(self, number: int) -> None:
        """Waits until all other ranks have sent so many signals.

        Raises:
            TimeoutError: One does not.
            ConnectionResetError: All of them have ended.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while late := [rank for rank, sent in enumerate(self._signals) if sent < number and rank != self._rank]:
            ready, _, _ = select.select([self._inbox], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Timed out waiting {self._timeout_seconds:g} s for the gradients of rank {late[0]}")
            signals = array(_SIGNAL, os.read(self._inbox, mmap.PAGESIZE))
            if not signals:
                raise ConnectionResetError(f"Connection closed by peer: rank {late[0]} has ended")
            for rank in signals:
                self._signals[rank] += 1

    def _part(self, rank: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        num_bytes = like.numel() * like.element_size()
        return self._copies[self._parity][rank][offset : offset + num_bytes].view(like.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
