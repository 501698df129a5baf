"""The network between ranks that are measured: that of this machine, or one that an engine makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from backends.registry import REFERENCE
from engines.interface import NodeJob
from engines.registry import find_engine
from launch.quantities import Bandwidth, format_bandwidth
from records.config import RunOptions

EngineName = Annotated[
    Literal["netns"] | None,
    Field(description="start each rank on a node of its own, made by this engine (default: all on this node)"),
]
Limit = Annotated[
    Bandwidth | None,
    Field(description="with --engine, what a node sends in a second at most, such as 1gbit (default: no limit)"),
]


# What files of collectives call the network of nodes that nothing limits; other machines go by their engine's name.
UNLIMITED = "unlimited"


def require_engine(engine: str | None, bandwidth: float | None) -> None:
    """Refuses a limit without an engine.

    Raises:
        ValueError: There is one.
    """
    if bandwidth is not None and engine is None:
        raise ValueError(f"--bandwidth {format_bandwidth(bandwidth)}: only an engine can limit it; add --engine netns")


def check_engine(engine: str, bandwidth: float | None, num_nodes: int) -> None:
    """Refuses an engine that cannot start so many nodes here.

    Raises:
        UsageError: The text says why.
    """
    kind = find_engine(engine)
    options = RunOptions.model_validate({})
    job = NodeJob(REFERENCE, (), options, num_nodes=num_nodes, num_processes=num_nodes, output_dir=Path())
    found = kind(job, kind.Settings.model_validate({"bandwidth": bandwidth}))
    found.check()
    found.check_here()


def engine_options(engine: str | None, bandwidth: float | None, num_processes: int) -> list[str]:
    """Returns the options of a run that start each of several ranks on a node of its own; none without an engine."""
    if num_processes == 1 or not (options := network_options(engine, bandwidth)):
        return []
    return [*options, f"--num-nodes={num_processes}"]


def network_options(engine: str | None, bandwidth: float | None) -> list[str]:
    """Returns the options that say this of a network; none without an engine."""
    limit = [] if bandwidth is None else [f"--bandwidth={format_bandwidth(bandwidth)}"]
    return [] if engine is None else [f"--engine={engine}", *limit]


def limit_in(network: str | None) -> str | None:
    """Returns the limit that a file of collectives names, such as 10gbit; None where none is known."""
    return network if network is not None and network[0].isdigit() else None
