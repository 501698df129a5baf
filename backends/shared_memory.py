"""Gradients of the ranks of one node, averaged through memory that they share.

gloo sends gradients through TCP, also to a rank on the same node: the kernel copies each byte twice. Here the buckets
into which DDP collects gradients are themselves in memory that the other ranks can reach. Each rank averages its share
of each bucket, and writes the result into the buckets of all: a reduce-scatter and an all-gather without a copy. DDP
lets its users replace the reduction of a bucket by a communication hook
(https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).

Memory is what torch shares between processes, a file in /dev/shm that loses its name as soon as it is made, so that
as good as nothing can be left of a rank that is killed. Ranks open each other's files through /proc, as
memfd_create(2) describes.
"""

from __future__ import annotations

import os
import select
import time
from array import array
from typing import Protocol

import torch
import torch.distributed as dist

from backends.traffic import Count

# So many numbers are averaged at a time: those of two ranks fit into the second-level cache of a core.
_AT_A_TIME = 32_768
# A signal is the number of the rank that sends it, of 16 bits: a pipe takes so few bytes whole, and gives them so.
_SIGNAL = "H"


class Bucket(Protocol):
    """What is used of torch.distributed.GradBucket, whose class torch does not describe for type checkers."""

    def buffer(self) -> torch.Tensor:
        """Returns the gradients in it, one after the other, flat."""

    def is_last(self) -> bool:
        """Returns whether no other follows in this step."""


class SharedGradients:
    """Averages buckets over all ranks, which are processes of one node and call `average` alike.

    Attributes:
        count: What counts the elements that are averaged, while anybody wants to know.
    """

    def __init__(self, *, most_buckets: int, timeout_seconds: float) -> None:
        """Connects the ranks of the default group.

        Args:
            most_buckets: How many buckets a step can have.
            timeout_seconds: How long to wait for another rank.

        Raises:
            RuntimeError: There is no memory to share.
            OSError: The system does not let ranks open each other's files.
        """
        self.count: Count | None = None
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._timeout_seconds = timeout_seconds
        files = torch.zeros(self._world_size, most_buckets, dtype=torch.int64)
        self._inbox, own_outbox = os.pipe()
        connections = torch.zeros(self._world_size, 3, dtype=torch.int64)
        connections[self._rank] = torch.tensor([os.getpid(), own_outbox, _shared_file(files)])
        dist.all_reduce(connections)
        self._processes, outboxes, of_files = connections.T.tolist()
        # In which file each rank has each of its buckets.
        self._files = files if self._rank == 0 else _opened(self._processes[0], of_files[0], files)
        self._outboxes = {
            rank: os.open(_path(process, outbox), os.O_WRONLY)
            for rank, (process, outbox) in enumerate(zip(self._processes, outboxes, strict=True))
            if rank != self._rank
        }
        dist.barrier()
        os.close(own_outbox)
        self._signals = [0] * self._world_size
        self._num_sent = 0
        self._arrived: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        # For each bucket, those of all ranks.
        self._buckets: list[list[torch.Tensor]] = []

    def average(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Takes a bucket; those of a step come in the same order on all ranks, and the last one completes them all.

        Raises:
            RuntimeError: There is not enough memory to share.
            OSError: Too many files are open.
            TimeoutError: Another rank does not come.
            ConnectionResetError: Another rank has ended.
        """
        buffer = bucket.buffer()
        if self.count is not None:
            self.count("shared_memory", buffer.numel(), buffer.nbytes)
        if buffer.numel() and not buffer.untyped_storage().is_shared():
            # In the first step and, mostly, the second: once DDP knows in which order gradients are ready, it makes its
            # buckets anew.
            self._buckets = []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._arrived.append((buffer, done))
        if bucket.is_last():
            self._complete([buffer for buffer, _ in self._arrived if buffer.numel()])
            for buffer, future in self._arrived:
                future.set_result(buffer)
            self._arrived.clear()
        return done

    def close(self) -> None:
        """Closes the connections to the other ranks, and leaves their buckets alone."""
        self._buckets.clear()
        for descriptor in (self._inbox, *self._outboxes.values()):
            os.close(descriptor)

    def _complete(self, buffers: list[torch.Tensor]) -> None:
        """Averages what is in the buckets of all ranks: each rank its share of each, so that all get the same bits."""
        if not self._buckets:
            self._buckets = self._share(buffers)
        self._meet()
        for of_ranks in self._buckets:
            shares = [one.tensor_split(self._world_size)[self._rank] for one in of_ranks]
            for start in range(0, shares[0].numel(), _AT_A_TIME):
                total, *others = (share[start : start + _AT_A_TIME] for share in shares)
                total.mul_(1 / self._world_size)
                for other in others:
                    total.add_(other.mul_(1 / self._world_size))
                for other in others:
                    other.copy_(total)
        self._meet()

    def _share(self, buffers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Moves buckets into memory that other ranks can reach, and returns those of all ranks for each of them."""
        self._meet()  # now the memory of those before is free
        self._files[self._rank, : len(buffers)] = torch.tensor([_shared_file(buffer) for buffer in buffers])
        self._meet()
        buckets = [[buffer] * self._world_size for buffer in buffers]  # those of other ranks follow
        for rank, (process, files) in enumerate(zip(self._processes, self._files.tolist(), strict=True)):
            if rank != self._rank:
                for of_ranks, own, file in zip(buckets, buffers, files, strict=False):
                    of_ranks[rank] = _opened(process, file, own)
        self._meet()  # no rank gives a bucket back before all have opened it
        return buckets

    def _meet(self) -> None:
        """Waits until all ranks have come here as often.

        A write to a pipe is a barrier to the processor: who reads the signal finds what was written before it.

        Raises:
            TimeoutError: One does not.
            ConnectionResetError: One has ended.
        """
        for rank, outbox in self._outboxes.items():
            try:
                os.write(outbox, array(_SIGNAL, [self._rank]))
            except BrokenPipeError as error:
                raise _ended(rank) from error
        self._num_sent += 1
        self._wait(self._num_sent)

    def _wait(self, number: int) -> None:
        """Waits until all other ranks have sent so many signals.

        Raises:
            TimeoutError: One does not.
            ConnectionResetError: One has ended.
        """
        deadline = time.monotonic() + self._timeout_seconds
        events = select.poll()
        events.register(self._inbox, select.POLLIN)
        for outbox in self._outboxes.values():
            events.register(outbox, 0)  # whether nobody is there any more who could read from it
        while late := [rank for rank, sent in enumerate(self._signals) if sent < number and rank != self._rank]:
            ready = [file for file, _ in events.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if not ready:
                raise TimeoutError(f"Timed out waiting {self._timeout_seconds:g} s for the gradients of rank {late[0]}")
            if self._inbox in ready and (signals := array(_SIGNAL, os.read(self._inbox, select.PIPE_BUF))):
                for rank in signals:
                    self._signals[rank] += 1
                continue
            for rank in late:
                if self._inbox in ready or self._outboxes[rank] in ready:
                    raise _ended(rank)
            for outbox in ready:  # of a rank that has ended, but had sent what is waited for
                events.unregister(outbox)


def _ended(rank: int) -> ConnectionResetError:
    return ConnectionResetError(f"Connection closed by peer: rank {rank} has ended")


def _shared_file(tensor: torch.Tensor) -> int:
    """Moves a tensor, and all that are views of the same, into memory that can be shared; returns its open file."""
    file, _ = tensor.untyped_storage()._share_fd_cpu_()
    return int(file)


def _opened(process: int, file: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of another process, which lies in its file as `like` does in ours."""
    # Unlike mmap.mmap, torch.from_file keeps no file open.
    size = like.untyped_storage().nbytes() // like.element_size()
    whole = torch.from_file(_path(process, file), shared=True, size=size, dtype=like.dtype)
    return whole[like.storage_offset() :][: like.numel()].view(like.shape)


def _path(process: int, file: int) -> str:
    return f"/proc/{process}/fd/{file}"
