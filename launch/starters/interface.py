"""The interface of a starter, which starts ranks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from launch.errors import UsageError
from launch.nodes import ALONE, DEFAULT_PORT, Nodes

PROJECT_DIRECTORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ranks:
    """The ranks to start.

    Attributes:
        num_processes: The number of ranks on all nodes.
        module: The module that each rank runs, and its arguments.
        device: "cpu" or "cuda".
        num_threads: CPU threads of each rank.
        master_port: The port that they meet on; None for any free one.
        timeout_seconds: How long a collective may wait.
        log_directory: Where the starter may write files of its own.
        nodes: The nodes that the ranks are spread over.
        preload: The library of a memory allocator, which LD_PRELOAD is to load; None for that of the C library.
        max_restarts: How often a starter whose nodes may leave starts its ranks again after a failure.
    """

    num_processes: int
    module: tuple[str, ...]
    device: str
    num_threads: int
    master_port: int | None
    timeout_seconds: float
    log_directory: Path
    nodes: Nodes = ALONE
    preload: str | None = None
    max_restarts: int = 0

    @property
    def num_local_processes(self) -> int:
        """The number of ranks that this node starts."""
        return self.num_processes // self.nodes.num_nodes

    @property
    def port(self) -> int:
        """The port on which several nodes meet."""
        return self.master_port or DEFAULT_PORT


class Starter(ABC):
    """A starter: a program that starts ranks, and how its command line is composed.

    Whatever the starter, each rank runs ``python -m MODULE ARGUMENTS`` in the project's directory, with the same
    number of threads. The last argument is the name of the environment variable that holds its rank.

    Attributes:
        name: Its name for --start-method.
        launcher: The name of the program for messages; None where the command starts the rank itself.
        rank_variable: The environment variable that holds the number of a rank; None where there is one rank only.
        variables: The environment variables by which the starter describes its ranks, or that change how it starts
            them; a name that ends with an underscore stands for all names that begin with it. Ranks do not inherit
            them from the user's shell.
        takes_port: Whether it can be given the port on which ranks meet.
        spans_nodes: Whether each of several nodes can start its share of the ranks.
        is_elastic: Whether it goes on with fewer nodes when some leave, and takes them in again.
        devices: The device types that the ranks may use.
    """

    name: ClassVar[str]
    launcher: ClassVar[str | None] = None
    rank_variable: ClassVar[str | None] = None
    variables: ClassVar[tuple[str, ...]] = ()
    takes_port: ClassVar[bool] = True
    spans_nodes: ClassVar[bool] = False
    is_elastic: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def check(self, ranks: Ranks) -> None:
        """Refuses what the starter cannot start here, before any work is done.

        Raises:
            UsageError: The starter is not installed, or cannot be given a port.
        """
        if ranks.master_port is not None and not self.takes_port:
            raise UsageError(f"--master-port {ranks.master_port}: {self.name} cannot be given a port; leave it out")

    @abstractmethod
    def command(self, ranks: Ranks) -> list[str]:
        """Composes the command that starts these ranks on this machine."""

    def environment(self, ranks: Ranks) -> dict[str, str]:
        """Returns the variables that the starter or its ranks need besides those of every starter."""
        return {}

    def program(self, ranks: Ranks) -> list[str]:
        """Returns what each rank runs: the module, its arguments, and the variable that holds the rank."""
        return [*ranks.module, *([self.rank_variable] if self.rank_variable is not None else [])]


def launcher_module(ranks: Ranks, module: str) -> list[str]:
    """Returns the command of a starter that is a Python module; on one node, it listens on loopback only."""
    confined = ["launch.starters.loopback"] if ranks.nodes.num_nodes == 1 else []
    return [sys.executable, "-m", *confined, module]
