"""Communication between ranks apart from training: checks of the group, facts of all ranks, bytes of one rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from backends.interface import Backend

_BROADCAST_BYTES = 64 * 1024 * 1024
_MATRIX_BYTES = 4 * 1024 * 1024


def prove_world(backend: Backend, *, world_size: int) -> None:
    """Makes sure that this process is one of exactly `world_size` distinct ranks that reach each other.

    A script that another library's launcher starts N times often finds itself alone in each process, and trains N
    unrelated models without any message.

    Raises:
        RuntimeError: There are more or fewer ranks, or they do not reach each other.
    """
    if backend.world_size != world_size:
        raise RuntimeError(f"asked for {world_size} ranks, but {backend.name} made a world of {backend.world_size}")
    seen = torch.zeros(world_size, device=backend.device)
    seen[backend.rank] = 1
    seen = backend.all_reduce(seen)
    if not torch.equal(seen, torch.ones_like(seen)):
        raise RuntimeError(
            f"{backend.name} reaches ranks {seen.nonzero().flatten().tolist()} of {world_size}, counted {seen.tolist()}"
        )


def world_size_of_process() -> int:
    """Returns how many ranks there are now, as torchrun's agent tells each rank that it starts.

    The variable is that of https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
    """
    return int(os.environ["WORLD_SIZE"])


def prove_same_job(backend: Backend, facts: dict[str, Any]) -> None:
    """Makes sure that all nodes were given the same options, have the same versions and found the same data.

    Raises:
        RuntimeError: The facts of a rank differ from those of rank 0; it names the first that does.
    """
    gathered = gather_facts(backend, facts)
    for rank, theirs in enumerate(gathered):
        for name, value in gathered[0].items():
            if theirs.get(name) != value:
                raise RuntimeError(
                    f"nodes differ in {name}: {value!r} where rank 0 is, {theirs.get(name)!r} where rank {rank} is; "
                    "give each the same command, the same versions and the same files"
                )


def gather_facts(backend: Backend, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of all ranks, in the order of ranks, to each of them."""
    return [json.loads(text) for text in gather_texts(backend, json.dumps(facts))]


def gather_texts(backend: Backend, text: str) -> Iterator[bytes]:
    """Yields the texts of all ranks, in the order of ranks, on each of them; all of them are to be taken.

    Each rank writes its text into its own row of a zero matrix. The sum of the matrices has all rows. Long texts, which
    such matrices would need several times the memory for, come one after the other.
    """
    content = text.encode()
    lengths = torch.zeros(backend.world_size, dtype=torch.int64, device=backend.device)
    lengths[backend.rank] = len(content)
    lengths = backend.all_reduce(lengths)
    if backend.world_size * int(lengths.max()) > _MATRIX_BYTES:
        yield from (broadcast_bytes(backend, content, source=rank) for rank in range(backend.world_size))
        return
    rows = torch.zeros(backend.world_size, int(lengths.max()), dtype=torch.int32, device=backend.device)
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)
    rows[backend.rank, : len(content)] = own.to(backend.device, torch.int32)
    rows = backend.all_reduce(rows).cpu().to(torch.uint8)
    yield from (row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist(), strict=True))


def newest_of(backend: Backend, age: int) -> int | None:
    """Returns the first rank with the highest `age`; None if it is 0 on all ranks."""
    highest = int(backend.all_reduce(torch.tensor([age], dtype=torch.int64, device=backend.device), "max"))
    if highest == 0:
        return None
    mine = backend.rank if age == highest else backend.world_size
    return int(backend.all_reduce(torch.tensor([mine], dtype=torch.int64, device=backend.device), "min"))


def broadcast_bytes(backend: Backend, content: bytes, *, source: int) -> bytes:
    """Returns the bytes that the rank `source` has to every rank.

    It uses `all_reduce`, which every backend has: the other ranks add zeros to integers, which is exact.
    """
    content = content if backend.rank == source else b""
    length = torch.tensor([len(content)], dtype=torch.int64, device=backend.device)
    num_bytes = int(backend.all_reduce(length))
    received = bytearray(num_bytes)
    for start in range(0, num_bytes, _BROADCAST_BYTES):
        stop = min(start + _BROADCAST_BYTES, num_bytes)
        piece = torch.zeros(-(-(stop - start) // 4) * 4, dtype=torch.uint8)
        if backend.rank == source:
            piece[: stop - start] = torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8)
        summed = backend.all_reduce(piece.view(torch.int32).to(backend.device)).cpu()
        received[start:stop] = summed.view(torch.uint8).numpy().tobytes()[: stop - start]
    return bytes(received)


def weights_digest(model: torch.nn.Module) -> str:
    """Returns the SHA-256 of the names and bytes of all parameters and buffers, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        add_to_digest(digest, name, tensor.detach().cpu())
    return digest.hexdigest()


def add_to_digest(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    """Adds the name and the bytes of a tensor on the CPU."""
    digest.update(name.encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
