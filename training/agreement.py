"""Comparison of the weights of all ranks, and the tensors that all ranks take over from rank 0.

Parameters must be the same bits on every rank, unless ranks hold different parts of them; if they are not, the run
ends. Buffers that change in training, such as the running statistics of BatchNorm, differ between ranks, since each
rank has seen other samples. Those of rank 0 count: at each evaluation and checkpoint the other ranks take them over. A
buffer that does not have the same shape on all ranks, such as a cache that grows, is left as it is on each of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from backends.interface import Backend
from records.news import Disagreed
from records.progress import ProgressLog
from records.record import Disagreement
from training.batch_norm import batch_norms
from watch.failures import PeerStopped

# The size of the pieces in which a tensor is processed, so that a large tensor needs little memory.
_PIECE_BYTES = 8 * 1024 * 1024
_NUM_NAMES = 5


class Difference(NamedTuple):
    """The names of tensors that are not the same bits on all ranks, and the ranks that differ from rank 0."""

    names: list[str]
    ranks: list[int]


class Agreement:
    """Compares the weights of all ranks at each evaluation and checkpoint; all ranks take part.

    Attributes:
        differing_buffers: The names of all buffers that have differed so far.
        disagreement: The parameters that differ; None while none do.
    """

    def __init__(self, backend: Backend, progress: ProgressLog, *, sync_batchnorm: bool = False) -> None:
        self._backend = backend
        self._progress = progress
        self._sync_batchnorm = sync_batchnorm
        self._buffers_before: dict[str, int] = {}
        self._agreed_step: int | None = None
        self._has_warned_of_shapes = False
        self.differing_buffers: list[str] = []
        self.disagreement: Disagreement | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Notes the buffers before the first step."""
        if self._backend.world_size > 1 and self._backend.rank == 0:
            self._buffers_before = {name: int(checksum(buffer)) for name, buffer in model.named_buffers()}

    def warn_of_changed_buffers(self, model: torch.nn.Module) -> None:
        """Warns, after the first step, of buffers that it has changed, since every rank has seen other samples."""
        buffers = dict(model.named_buffers())
        changed = [
            name
            for name, before in self._buffers_before.items()
            if name not in buffers or int(checksum(buffers[name])) != before
        ]
        self._buffers_before = {}
        layers = batch_norms(model)
        others = [name for name in changed if name.rpartition(".")[0] not in layers]
        differs = f"the result of {self._backend.world_size} ranks differs from single-process training"
        alone = ""
        if len(others) < len(changed) and not self._sync_batchnorm:
            alone = f"{len(layers)} layer(s) of BatchNorm take the statistics of each rank's own samples"
        if alone and not others:
            self._progress.warn(
                f"{alone}, so {differs}; --sync-batchnorm takes those of all ranks; the running statistics of rank 0 "
                "are used for evaluation and saved"
            )
        elif others:
            named = changed if alone else others
            remedy = f"; {alone}, and with --sync-batchnorm those of all ranks" if alone else ""
            self._progress.warn(
                f"{len(named)} buffer(s) change in training ({_listed(named)}): with such layers, {differs}; "
                f"the buffers of rank 0 are used for evaluation and saved{remedy}"
            )

    def check(self, model: torch.nn.Module, step: int, *, may_be_last: bool) -> None:
        """Compares the weights after `step`; the other ranks take over the buffers of rank 0 that differ.

        If parameters differ after what may be the last step, they are taken over, too, so that the model which is
        evaluated is the one that will be saved.
        """
        if self._backend.world_size == 1:
            return
        # Parts of weights are different on each rank, and nobody else has them.
        shards_weights = self._backend.capabilities.shards_weights
        parameters = {} if shards_weights else dict(model.named_parameters())
        buffers = self._buffers_of_all_ranks(model)
        difference = differences(self._backend, parameters | buffers)
        differing = [name for name in difference.names if name in parameters]
        differing_buffers = [name for name in difference.names if name in buffers]
        self.differing_buffers = sorted({*self.differing_buffers, *differing_buffers})
        if differing:
            self.disagreement = Disagreement(
                step=step,
                agreed_step=self._agreed_step,
                ranks=difference.ranks,
                parameters=differing,
                buffers=differing_buffers,
            )
            self._progress.write(Disagreed(disagreement=self.disagreement))
            if not may_be_last:
                return
        elif parameters:
            self._agreed_step = step
        take_over(self._backend, [(parameters | buffers)[name] for name in difference.names])

    def _buffers_of_all_ranks(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns the buffers that can be compared, in the same order on all ranks; warns once if some cannot."""
        buffers = dict(sorted(model.named_buffers()))
        common = of_all_ranks(self._backend, buffers)
        if common is None:
            return buffers
        if not self._has_warned_of_shapes:
            self._has_warned_of_shapes = True
            own = sorted(buffers.keys() - common.keys())
            self._progress.warn(
                f"not all ranks have the same buffers with the same shapes ({_listed(own) or 'rank 0 has fewer'}): "
                "each rank evaluates with its own, and those of rank 0 are saved"
            )
        return common

    def end_run(self) -> None:
        """Ends a run that was to go on, if parameters differ.

        Raises:
            RuntimeError: It names the parameters. Every rank raises it, and those that differ from rank 0 say so.
        """
        if self.disagreement is not None:
            text = f"{describe(self.disagreement)}; {REMEDY}"
            raise RuntimeError(text) if self._backend.rank in self.disagreement.ranks else PeerStopped(text)


REMEDY = (
    "look for a layer outside of the wrapper, a rank that computes at random, or faulty memory; then go on with "
    "--resume, from the newest checkpoint if there is one: ranks agree when a checkpoint is saved"
)


def describe(disagreement: Disagreement) -> str:
    """Returns a line that says which ranks and tensors differ, and since when."""
    ranks = ", ".join(map(str, disagreement.ranks))
    agreed = disagreement.agreed_step
    since = f"after step {agreed} they still agreed" if agreed is not None else "they were not compared before"
    buffers = f" and of {len(disagreement.buffers)} buffer(s)" if disagreement.buffers else ""
    return (
        f"the weights of rank {ranks} differ from those of rank 0 after step {disagreement.step} ({since}): "
        f"{len(disagreement.parameters)} parameter(s), {_listed(disagreement.parameters)}{buffers}"
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 64-bit checksum of the bits of a tensor, computed on its device: 0-d int64.

    Eight bytes at a time are mixed with their position before they are summed, so that the checksum changes when two
    words change places. Integer sums wrap around, so that their order does not matter.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(content), _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        padded = torch.zeros(-(-len(piece) // 8) * 8, dtype=torch.uint8, device=tensor.device)
        padded[: len(piece)] = piece
        words = padded.view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(words), dtype=torch.int64, device=tensor.device)
        # Multiplication by an odd number loses no bit; the shift mixes the upper bits into the lower ones.
        mixed = words + places * -7046029254386353131
        mixed = (mixed ^ (mixed >> 32)) * -4417276706812531889
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def of_all_ranks(backend: Backend, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Finds the tensors that every rank has with the same name, shape and dtype; None if all of them are."""
    marks = {name: _digest(f"{name} {tensor.dtype} {[*tensor.shape]}") for name, tensor in tensors.items()}
    layout = _digest(" ".join(map(str, marks.values())))
    facts = torch.tensor([layout, ~layout, len(marks)], device=backend.device)
    highest, complement_of_lowest, most = backend.all_reduce(facts, "max").tolist()
    if highest == ~complement_of_lowest:
        return None
    rows = torch.zeros(backend.world_size, most, dtype=torch.int64, device=backend.device)
    rows[backend.rank, : len(marks)] = torch.tensor([*marks.values()], dtype=torch.int64)
    common = set[int].intersection(*(set(row) for row in backend.all_reduce(rows).tolist()))
    return {name: tensors[name] for name, mark in marks.items() if mark in common}


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def differences(backend: Backend, tensors: dict[str, torch.Tensor]) -> Difference:
    """Finds the tensors that are not the same bits on all ranks, with one reduction of the checksums of all."""
    if not tensors:
        return Difference([], [])
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    # The maximum of the complements is the complement of the minimum.
    highest, lowest = backend.all_reduce(torch.cat([sums, ~sums]), "max").chunk(2)
    differing = (highest != ~lowest).nonzero().flatten()
    if not len(differing):
        return Difference([], [])
    rows = torch.zeros(backend.world_size, len(differing), dtype=torch.int64, device=sums.device)
    rows[backend.rank] = sums[differing]
    rows = backend.all_reduce(rows)
    names = list(tensors)
    others = (rows != rows[0]).any(dim=1).nonzero().flatten()
    return Difference([names[index] for index in differing.tolist()], others.tolist())


def take_over(backend: Backend, tensors: Iterable[torch.Tensor]) -> None:
    """Replaces tensors by those of rank 0, to the bit: the other ranks add zeros to integers."""
    for tensor in tensors:
        mine = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        received = torch.empty_like(mine)
        for start in range(0, len(mine), _PIECE_BYTES):
            piece = mine[start : start + _PIECE_BYTES]
            padded = torch.zeros(-(-len(piece) // 4) * 4, dtype=torch.uint8, device=tensor.device)
            if backend.rank == 0:
                padded[: len(piece)] = piece
            summed = backend.all_reduce(padded.view(torch.int32)).view(torch.uint8)
            received[start : start + len(piece)] = summed[: len(piece)]
        with torch.no_grad():
            tensor.copy_(received.view(tensor.dtype).reshape(tensor.shape))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMES]) + (", ..." if len(names) > _NUM_NAMES else "")
