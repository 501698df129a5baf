"""One job: the command that starts its starter, and what the supervisor must know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.capabilities import Signs
from launch.nodes import ALONE, DEFAULT_PORT, Nodes
from launch.starters.environment import starter_environment
from launch.starters.interface import Ranks, Starter


@dataclass(frozen=True)
class Job:
    """What is started on this machine.

    Attributes:
        command: The command line.
        environment: Its environment.
        run_directory: Where its ranks leave their files.
        num_processes: How many of its ranks run on this machine.
        launcher: The name of its starter for messages; None where the command starts the rank itself.
        signs: How the ranks' library shows that a rank waits for others, or has lost one.
        nodes: The nodes that run it, and which of them this machine is.
        port: The port of node 0 on which several nodes meet.
        must_end_cleanly: Whether an error of the starter fails the job even after all ranks have succeeded.
        waits_in_forward: Whether its ranks wait for each other in the forward pass, too.
    """

    command: list[str]
    environment: Mapping[str, str]
    run_directory: Path
    num_processes: int
    launcher: str | None
    signs: Signs
    nodes: Nodes = ALONE
    port: int = DEFAULT_PORT
    must_end_cleanly: bool = False
    waits_in_forward: bool = False

    @property
    def spans_nodes(self) -> bool:
        """Whether other nodes run a part of the job."""
        return self.nodes.num_nodes > 1


def compose_job(starter: Starter, ranks: Ranks, run_directory: Path, signs: Signs) -> Job:
    """Composes the job in which a starter starts ranks.

    Raises:
        UsageError: The starter cannot start them here.
    """
    starter.check(ranks)
    return Job(
        command=starter.command(ranks),
        environment=starter_environment(starter, ranks),
        run_directory=run_directory,
        num_processes=ranks.num_local_processes,
        launcher=starter.launcher,
        signs=signs,
        nodes=ranks.nodes,
        port=ranks.port,
    )
