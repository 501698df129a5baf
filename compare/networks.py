"""The network between the ranks of a race: that of one machine, real or made by an engine, or one between machines."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from backends.registry import REFERENCE
from compare.machine_facts import network_between
from engines.hosts import address_of
from engines.interface import Engine, NodeJob
from engines.mpi import MpiSettings, address_of_first
from engines.netns import NetnsSettings, describe_network
from engines.registry import find_engine
from launch.errors import UsageError
from launch.options import validated
from launch.quantities import Bandwidth, format_bandwidth
from records.config import RunOptions

EngineName = Annotated[
    Literal["netns", "mpi"] | None,
    Field(
        description="start ranks on nodes: netns makes one for each rank on this machine, mpi reaches --hosts "
        "(default: all on this node)"
    ),
]
Limit = Annotated[
    Bandwidth | None,
    Field(description="with --engine netns, what a node sends in a second at most, such as 1gbit (default: no limit)"),
]
Hosts = Annotated[
    str | None,
    Field(
        description="with --engine mpi, the machines that share the ranks, this one first, such as a,b",
        json_schema_extra={"metavar": "HOSTS"},
    ),
]


# What files of collectives call the network of nodes that nothing limits; other machines go by their engine's name.
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class RaceNetwork:
    """Where the ranks of a race are started.

    Attributes:
        engine: What starts them; None for this machine alone.
        bandwidth: What a node sends in a second at most, in bits; None if nothing limits it.
        hosts: The machines that share the ranks, separated by commas; None for this one.
    """

    engine: str | None = None
    bandwidth: float | None = None
    hosts: str | None = None

    def __post_init__(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            ValueError: The text says what.
        """
        if self.bandwidth is not None and self.engine != "netns":
            raise ValueError(
                f"--bandwidth {format_bandwidth(self.bandwidth)}: only an engine can limit it; add --engine netns"
            )
        if self.hosts is not None and self.engine != "mpi":
            raise ValueError(f"--hosts {self.hosts}: only an engine can reach them; add --engine mpi")
        if self.engine == "mpi":
            if self.hosts is None:
                raise ValueError("--engine mpi: --hosts is missing; name the machines, this one first: --hosts a,b")
            if "num_processes" in validated(MpiSettings, {"hosts": self.hosts}).sizes():
                raise ValueError(f"--hosts {self.hosts}: a race divides its ranks evenly; name the hosts alone")

    @property
    def machines(self) -> list[str]:
        """The names of the machines that share the ranks; nothing if all are on this one."""
        return [host.strip() for host in self.hosts.split(",")] if self.hosts is not None else []

    @property
    def num_machines(self) -> int:
        """The number of machines that share the ranks."""
        return max(1, len(self.machines))

    def num_nodes(self, num_processes: int) -> int:
        """Returns the number of nodes of so many ranks; one rank is on this machine."""
        if num_processes == 1 or self.engine is None:
            return 1
        return len(self.machines) or num_processes

    def described(self, num_processes: int) -> str | None:
        """Returns what the record of a run of so many ranks will say of its network; None if they are on one node."""
        num_nodes = self.num_nodes(num_processes)
        if self.engine == "netns" and num_processes > 1:
            return describe_network(num_nodes, NetnsSettings.model_validate({"bandwidth": self.bandwidth}))
        return network_between(num_nodes, None)

    def words(self) -> list[str]:
        """Returns the options that say this to another command; none without an engine."""
        limit = [] if self.bandwidth is None else [f"--bandwidth={format_bandwidth(self.bandwidth)}"]
        hosts = [] if self.hosts is None else [f"--hosts={self.hosts}"]
        return [] if self.engine is None else [f"--engine={self.engine}", *limit, *hosts]

    def options(self, num_processes: int) -> list[str]:
        """Returns the options of a run of so many ranks, whichever machine asks; none if all are on one node."""
        if num_processes == 1 or self.engine is None:
            return []
        return [*self.words(), *(() if self.machines else (f"--num-nodes={num_processes}",))]

    def place_of_meeting(self, num_processes: int) -> list[str]:
        """Returns the options that only a run of so many ranks has that is started now, on this machine.

        Nodes on other machines have no network of their own, so each run gets a port that is free now.
        """
        if num_processes == 1 or not self.machines:
            return []
        return [f"--master-port={self._free_port()}"]

    def options_here(self, num_processes: int) -> list[str]:
        """Returns the options of the part of such a run that is on this machine, for checking them."""
        if num_processes == 1 or not self.machines:
            return []
        here = [f"--num-nodes={len(self.machines)}", f"--master-addr={self.address(num_processes)}"]
        return [*here, *self.place_of_meeting(num_processes)]

    def _free_port(self) -> int:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((self.address(2) or "", 0))
            return int(probe.getsockname()[1])

    def address(self, num_processes: int) -> str | None:
        """Returns an address at which so many ranks reach this machine; None if they are all on it."""
        if num_processes == 1 or not self.machines:
            return None
        return address_of_first(MpiSettings.model_validate({"hosts": self.hosts}).listed)

    def check(self, num_processes: Sequence[int]) -> None:
        """Refuses nodes that cannot be started from here.

        Raises:
            UsageError: The text says why.
        """
        if self.engine is None:
            return
        for number in (one for one in num_processes if one > 1):
            if number % self.num_nodes(number):
                raise UsageError(
                    f"--num-processes {number}: the {len(self.machines)} hosts of --hosts {self.hosts} share the ranks "
                    f"evenly; ask for a multiple of {len(self.machines)}"
                )
        for host in self.machines:
            _resolved(host)
        if self.machines and not _is_this_machine(self.machines[0]):
            raise UsageError(
                f"--hosts {self.hosts}: {self.machines[0]} is another machine; name this one first, where one process "
                "races against all"
            )
        most = max(num_processes)
        kind = find_engine(self.engine)
        asked = {
            name: value for name, value in (("bandwidth", self.bandwidth), ("hosts", self.hosts)) if value is not None
        }
        job = NodeJob(
            *(REFERENCE, (), RunOptions.model_validate({})),
            num_nodes=self.num_nodes(most),
            num_processes=most,
            output_dir=Path(),
            device="cpu",  # which these engines do not look at
        )
        engine: Engine[Any] = kind(job, kind.Settings.model_validate(asked))
        engine.check()
        engine.check_here()


def _resolved(host: str) -> str:
    """Returns the address of a host.

    Raises:
        UsageError: Its name cannot be resolved.
    """
    try:
        return address_of(host)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--hosts: {host} cannot be found ({error}); give its address") from error


def _is_this_machine(host: str) -> bool:
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind((_resolved(host), 0))
        except OSError:
            return False
    return True
