"""The table of starters."""

from __future__ import annotations

from collections.abc import Sequence

from launch.errors import UsageError
from launch.nodes import ALONE, Nodes
from launch.starters.accelerate import AccelerateLaunch
from launch.starters.horovod_node import HorovodNode
from launch.starters.horovod_torchrun import HorovodTorchrun
from launch.starters.horovodrun import Horovodrun
from launch.starters.interface import Starter
from launch.starters.mpirun import Mpirun
from launch.starters.multiprocessing import Fork, Spawn
from launch.starters.python import Python
from launch.starters.torchrun import Torchrun

STARTERS: dict[str, Starter] = {
    starter.name: starter
    for starter in (
        *(Python(), Torchrun(), Fork(), Spawn(), AccelerateLaunch()),
        *(Horovodrun(), HorovodNode(), HorovodTorchrun(), Mpirun()),
    )
}


def settle_starter(
    backend: str, start_methods: Sequence[str], start_method: str | None, *, device: str, nodes: Nodes = ALONE
) -> Starter:
    """Settles what starts a backend's ranks: the starter that the user names, or the first that can start them there.

    Args:
        backend: The name of the backend, for messages.
        start_methods: The names of the backend's starters, in the order of preference.
        start_method: The name of the starter that the user names, or None.
        device: "cpu" or "cuda".
        nodes: On which nodes.

    Raises:
        UsageError: No starter of the backend can start the ranks there, or not the one that the user names.
    """
    starters = [starter for starter in map(find_starter, start_methods) if device in starter.devices]
    if not starters:
        raise UsageError(f"--device {device}: {backend} is started by {_alternatives(start_methods)}, without {device}")
    if nodes.num_nodes > 1:
        starters = [starter for starter in starters if starter.spans_nodes]
    if not starters:
        raise UsageError(
            f"--num-nodes {nodes.num_nodes}: {backend} cannot run on several nodes; use one node or another backend"
        )
    if nodes.may_leave:
        starters = [starter for starter in starters if starter.is_elastic]
    if not starters:
        raise UsageError(
            f"--min-nodes {nodes.min_nodes}: nothing that starts {backend} on several nodes lets nodes leave; leave "
            "the option out, or choose another backend"
        )
    if start_method is None:
        return starters[0]
    for starter in starters:
        if starter.name == start_method:
            return starter
    where = "on nodes that may leave " if nodes.may_leave else ""
    where = where or "on several nodes " if nodes.num_nodes > 1 else "on GPUs " if start_method in start_methods else ""
    choice = _alternatives([starter.name for starter in starters])
    raise UsageError(f"--start-method {start_method}: {backend} is {where}started by {choice}")


def _alternatives(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def find_starter(name: str) -> Starter:
    """Looks up a starter by its name.

    Raises:
        UsageError: There is no such starter.
    """
    if name not in STARTERS:
        raise UsageError(f"start method {name!r}: there is no such starter; choose {', '.join(STARTERS)}")
    return STARTERS[name]
