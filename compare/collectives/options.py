"""The options of the benchmark of collectives."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from compare.collectives.measurement import ELEMENT_BYTES, OPERATIONS, Operation
from compare.numbers import format_size
from launch.comma_lists import CommaList, Names, Numbers
from records.config import ThreadCount

_UNITS = {"": 1, "B": 1, "KB": 2**10, "KIB": 2**10, "MB": 2**20, "MIB": 2**20, "GB": 2**30, "GIB": 2**30}
_STEP = 4  # from one size of a range to the next
_MAX_BYTES = 4 * 2**30


def _more_than_one(num_processes: int) -> int:
    if num_processes == 1:
        raise ValueError("a single rank has no other rank to communicate with; choose 2 or more")
    return num_processes


class CollectivesOptions(BaseModel):
    """What a user may ask of the benchmark of collectives."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    backends: Names | None = Field(
        None, description="also your own, as package.module:Class (default: each that communicates in its own way)"
    )
    num_processes: Numbers[Annotated[int, Field(ge=1, le=64), AfterValidator(_more_than_one)]] | None = Field(
        None, description="numbers of ranks, measured in turn (default: one per GPU, at least 2)"
    )
    sizes: str = Field(
        "1KiB..256MiB", description="sizes, or ranges in steps of a factor of 4; 1KiB = 1KB = 1024 bytes"
    )
    operations: CommaList[Operation] = Field(list(OPERATIONS), description="collectives")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the buffers are")
    start_method: str | None = Field(None, description="what starts the ranks (default: each backend's own launcher)")
    engine: str | None = Field(
        None,
        description="start the ranks on nodes: netns, slurm, mpi or ray, with its own options (default: all here)",
    )
    num_nodes: int | None = Field(
        None,
        ge=1,
        description="with --engine, the number of nodes (default: one for each rank, or for each node's GPUs)",
    )
    threads_per_rank: ThreadCount | None = Field(
        None, description="CPU threads of a rank (default: cores / ranks, and 1 on other machines)"
    )
    timeout: float = Field(60.0, ge=1, le=10**6, description="seconds after which a collective that waits is an error")
    seconds_per_point: float = Field(
        0.3, ge=0, le=3600, description="how long to repeat each collective at each size, 5 to 100 times"
    )
    starts: int = Field(
        1, ge=1, le=100, description="how often ranks are started; equally many repetitions of each start count"
    )
    output: Path | None = Field(None, description="must not exist yet (default: runs/collectives-TIME.json)")

    @model_validator(mode="after")
    def _has_nodes(self) -> CollectivesOptions:
        if self.num_nodes is not None and self.engine is None:
            raise ValueError(f"--num-nodes {self.num_nodes}: only an engine starts nodes; add --engine")
        return self

    @field_validator("sizes")
    @classmethod
    def _are_sizes(cls, value: str) -> str:
        parse_sizes(value)
        return value


def parse_sizes(text: str) -> list[int]:
    """Reads sizes such as ``1KiB,64KiB`` or ``1KiB..256MiB``; in a range, each size is four times the one before.

    Returns:
        The sizes in bytes, from the smallest to the largest; both ends of a range are among them.

    Raises:
        ValueError: The text is not a list of sizes, or one of them is not a whole number of float32 values.
    """
    sizes: set[int] = set()
    for word in text.split(","):
        first, dots, last = (part.strip() for part in word.partition(".."))
        low = _size(first)
        high = _size(last) if dots else low
        if high < low:
            raise ValueError(f"the range {word} ends below its beginning; write {last}..{first}")
        while low < high:
            sizes.add(low)
            low *= _STEP
        sizes.add(high)
    return sorted(sizes)


def _size(word: str) -> int:
    match = re.fullmatch(r"([0-9]+) *([a-z]*)", word, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(
            f"'{word:.40}' is not a size; write a number with B, KiB, MiB or GiB, such as 64KiB or 1KiB..256MiB"
        )
    # A number with more digits than this is too large in any unit, and int() refuses thousands of them.
    num_bytes = int(match[1]) * _UNITS[match[2].upper()] if len(match[1]) < 20 else math.inf
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"{word:.40} is too large; choose sizes up to {format_size(_MAX_BYTES)}")
    if num_bytes == 0 or num_bytes % ELEMENT_BYTES:
        raise ValueError(f"{word} must be a multiple of {ELEMENT_BYTES} bytes, the size of a float32 value")
    return int(num_bytes)
