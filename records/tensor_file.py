"""A safetensors file that is read piece by piece, so that a reader needs no memory for the whole of it.

The format (https://github.com/huggingface/safetensors#format): the length of the header in eight bytes, the header in
JSON, and the bytes of the tensors. The library reads the header first, and refuses a file whose header does not fit it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# The size of a piece.
PIECE_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 8
# The names of torch's types by those of the format.
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "C64": "complex64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}


class TensorFacts(NamedTuple):
    """What a header says of a tensor.

    Attributes:
        dtype: The name of its type in torch, such as "float32".
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Makes such a tensor, whose content is not set; on "meta" it has none."""
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class TensorFile:
    """An open file.

    Attributes:
        metadata: The text that the file holds beside its tensors, by name.
        facts: The tensors, sorted by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            OSError: It cannot be read.
            SafetensorError, ValueError: It is incomplete, or not of this format.
        """
        from safetensors import safe_open

        with safe_open(path, framework="np"):  # which checks that the header fits the file
            pass
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        self._first = _LENGTH_BYTES + length
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        unknown = {entry["dtype"] for entry in header.values()} - _DTYPES.keys()
        if unknown:
            raise ValueError(f"it has tensors of the type {min(unknown)}")
        self.facts = {
            name: TensorFacts(_DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in sorted(header.items())
        }
        self._places = {name: entry["data_offsets"] for name, entry in header.items()}

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a tensor, in pieces of at most `PIECE_BYTES`.

        Raises:
            OSError: They cannot be read.
        """
        begin, end = self._places[name]
        with self._path.open("rb") as file:
            file.seek(self._first + begin)
            while begin < end:
                piece = file.read(min(PIECE_BYTES, end - begin))
                if not piece:
                    raise OSError(f"{self._path} has become shorter")
                begin += len(piece)
                yield piece


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 [bytes]; they share its memory if it is contiguous."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def piece_of(content: bytes) -> torch.Tensor:
    """Returns bytes as a tensor, uint8 [bytes]."""
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
