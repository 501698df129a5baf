"""A checkpoint that one rank reads and all ranks receive, tensor by tensor, so that it is never in memory twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from backends.interface import Backend
from records.checkpoint import CheckpointError, CheckpointFile, ContentDigest, parse_state
from records.tensor_file import PIECE_BYTES, TensorFacts, as_bytes, piece_of
from training.world import broadcast_bytes


class IncomingCheckpoint:
    """What all ranks know of it before they receive its tensors. All methods are collective.

    Attributes:
        state: Everything but the tensors.
        facts: The tensors, sorted by name.
    """

    def __init__(self, backend: Backend, path: Path | None, *, source: int) -> None:
        """Has the rank `source` check its file, and all ranks receive what it says.

        Raises:
            CheckpointError: The file cannot be used.
        """
        self._backend, self._source = backend, source
        self._file = CheckpointFile(path) if path is not None and backend.rank == source else None
        self._name = str(path or f"the checkpoint of rank {source}")
        told = b""
        if self._file is not None:
            told = json.dumps([self._file.text, self._file.digest, self._file.facts]).encode()
        text, self._expected, facts = json.loads(broadcast_bytes(backend, told, source=source))
        self.state = parse_state(text, self._name)
        self.facts = {name: TensorFacts(dtype, tuple(shape)) for name, (dtype, shape) in facts.items()}
        self._digest = ContentDigest(text)
        self._waiting = list(self.facts)

    def take(
        self, prefix: str, keep: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor
    ) -> dict[str, torch.Tensor]:
        """Receives the tensors whose names begin with `prefix`, which must be next in the order of names.

        Args:
            prefix: What the names begin with.
            keep: Given the rest of a name and the tensor, returns what is to be kept of it.

        Returns:
            The tensors on the CPU, by the rest of their names, without the dot after the prefix.
        """
        taken: dict[str, torch.Tensor] = {}
        while self._waiting and self._waiting[0].startswith(prefix):
            name = self._waiting.pop(0)
            rest = name.removeprefix(prefix).removeprefix(".")
            taken[rest] = keep(rest, self._receive(name))
        return taken

    def finish(self) -> None:
        """Makes sure that all was received, and as it was sent.

        Raises:
            CheckpointError: Something is left, or differs.
        """
        if self._waiting:
            raise CheckpointError(f"{self._name}: is of another model (nothing here is called {self._waiting[0]})")
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._name}: was damaged on its way from rank {self._source}")

    def _receive(self, name: str) -> torch.Tensor:
        tensor, begin = self.facts[name].empty(), 0
        content = as_bytes(tensor)
        self._digest.begin(name, self.facts[name])
        pieces = self._file.pieces(name) if self._file is not None else None
        while begin < len(content):
            size = min(PIECE_BYTES, len(content) - begin)
            # Integers of 32 bits are what every library sums exactly; the other ranks add zeros.
            piece = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8)
            if pieces is not None:
                piece[:size] = piece_of(next(pieces))
            summed = self._backend.all_reduce(piece.view(torch.int32).to(self._backend.device)).cpu()
            content[begin : begin + size] = summed.view(torch.uint8)[:size]
            self._digest.update(content[begin : begin + size].numpy().data)
            begin += size
        return tensor
