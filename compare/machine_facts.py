"""Where runs took place, and how idle the machine was: parts of results."""

from __future__ import annotations

from pydantic import Field

from compare.strict import Strict

# What several machines are called; an engine that makes several nodes on one machine has words of its own.
_NODES = "nodes"


class Machine(Strict):
    """One machine."""

    label: str = Field(description="unique in this report: 'AMD EPYC, 2 cores'")
    cpu: str
    num_cpus: int
    gpus: list[str]
    marks: list[str] = Field(
        description="digests of the names of its hosts, and of each of its starts: two descriptions of equal hardware "
        "are of one machine if they share a mark"
    )


class Place(Strict):
    """Where runs took place, and how idle the machine was."""

    machine: str = Field(description="GPUs or CPUs, in words")
    software: str = Field(description="versions, commit")
    hardware: Machine | None = Field(default=None, description="the same as facts; null in older results")
    versions: dict[str, str] = Field(default={}, description="of Python, packages, CUDA, NCCL and the kernel")
    num_runs: int
    idleness: str | None = Field(description="what was seen before and during the runs, in words")


class Idleness(Strict):
    """What share of the machine's cores other programs took while entrants were timed."""

    mean: float
    largest: float = Field(description="in one start of an entrant; in results of 2026-11-27 and before, in one turn")


def network_between(num_nodes: int, made: str | None) -> str | None:
    """Returns the network between nodes in words; None if there is one node.

    Args:
        num_nodes: How many nodes there are.
        made: What the engine says of the network, if it has made it.
    """
    return (made or f"{num_nodes} {_NODES}") if num_nodes > 1 else None


def kind_of(network: str | None) -> str | None:
    """Returns the words on a network without the number of its nodes: networks of one kind differ in nothing else."""
    return network if network is None else network.lstrip("0123456789").lstrip()


def is_between_machines(network: str | None) -> bool:
    """Tells whether a network connects machines, and is none that an engine has made on one."""
    return kind_of(network) == _NODES
