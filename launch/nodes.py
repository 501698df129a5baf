"""Several nodes that run one job: each gets the same command, except for its number."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from dataclasses import dataclass

from launch.errors import UsageError

DEFAULT_PORT = 29500

_SIOCGIFADDR = 0x8915  # netdevice(7)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and which of them this machine is.

    Attributes:
        num_nodes: The number of nodes; each runs equally many ranks.
        min_nodes: With how many of them the job goes on when others leave; None if it needs all.
        node_rank: The number of this node, from 0.
        master_addr: Where the nodes meet: an address of node 0, resolved.
    """

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    min_nodes: int | None = None

    @property
    def may_leave(self) -> bool:
        """Whether nodes may leave the job and return to it."""
        return self.min_nodes is not None


ALONE = Nodes()


def check_nodes(num_nodes: int, node_rank: int, master_addr: str | None) -> None:
    """Checks what is asked of nodes, whichever machine this is.

    Raises:
        UsageError: An option contradicts another.
    """
    if node_rank >= num_nodes:
        raise UsageError(
            f"--node-rank {node_rank}: must be smaller than --num-nodes {num_nodes}, since nodes are numbered from 0; "
            "change one of the two"
        )
    if num_nodes == 1 and master_addr is not None:
        raise UsageError(f"--master-addr {master_addr}: has no effect on one node; add --num-nodes, or leave it out")


def settle_nodes(num_nodes: int, node_rank: int, master_addr: str | None, min_nodes: int | None = None) -> Nodes:
    """Finds the way from this machine to node 0, once `check_nodes` has passed.

    Raises:
        UsageError: The address is missing, or leads nowhere.
    """
    if num_nodes == 1:
        return ALONE
    if master_addr is None:
        raise UsageError(f"--num-nodes {num_nodes}: --master-addr is missing; give an address of node 0")
    try:
        address = socket.gethostbyname(master_addr)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--master-addr {master_addr}: cannot be resolved ({error}); give node 0's address") from error
    nodes = Nodes(num_nodes, node_rank, address, min_nodes)
    try:
        interface(nodes)
    except OSError as error:
        raise UsageError(
            f"--master-addr {master_addr}: this machine has no route to it ({error.strerror}); "
            "give another address of node 0"
        ) from error
    return nodes


def own_address(nodes: Nodes) -> str:
    """Returns the address at which other nodes reach this one: that of the interface that leads to node 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((nodes.master_addr, DEFAULT_PORT))  # sends nothing
        return str(probe.getsockname()[0])


def interface(nodes: Nodes) -> str:
    """Returns the name of the interface that leads to node 0; the loopback interface if there is one node only.

    Raises:
        OSError: No route leads to node 0.
        UsageError: The address is not the first one of its interface.
    """
    if nodes.num_nodes == 1:
        return "lo"
    address = own_address(nodes)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise UsageError(
        f"--master-addr {nodes.master_addr}: the way there leads from {address}, which is not the first address of a "
        "network interface; give another address of node 0"
    )


def check_port(port: int, address: str) -> None:
    """Raises UsageError when nothing can listen on this port of this address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"--master-addr {address}: this machine is node 0 and does not have this address; "
                    "give one of its addresses"
                ) from error
            raise UsageError(
                f"--master-port {port}: is not free ({error.strerror}); choose another port, or leave the option out"
            ) from error
