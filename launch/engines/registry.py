"""The table of engines."""

from __future__ import annotations

from collections.abc import Sequence

from launch.engines.accelerate import AccelerateLaunch
from launch.engines.horovod_node import HorovodNode
from launch.engines.horovodrun import Horovodrun
from launch.engines.interface import Engine
from launch.engines.mpirun import Mpirun
from launch.engines.multiprocessing import Fork, Spawn
from launch.engines.python import Python
from launch.engines.torchrun import Torchrun
from launch.errors import UsageError

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (Python(), Torchrun(), Fork(), Spawn(), AccelerateLaunch(), Horovodrun(), HorovodNode(), Mpirun())
}


def settle_engine(
    backend: str, start_methods: Sequence[str], start_method: str | None, *, device: str, num_nodes: int = 1
) -> Engine:
    """Settles what starts a backend's ranks: the engine that the user names, or the first that can start them there.

    Args:
        backend: The name of the backend, for messages.
        start_methods: The names of the backend's engines, in the order of preference.
        start_method: The name of the engine that the user names, or None.
        device: "cpu" or "cuda".
        num_nodes: On how many nodes.

    Raises:
        UsageError: No engine of the backend can start the ranks there, or not the one that the user names.
    """
    engines = [engine for engine in map(find_engine, start_methods) if device in engine.devices]
    if not engines:
        raise UsageError(f"--device {device}: {backend} is started by {_alternatives(start_methods)}, without {device}")
    if num_nodes > 1:
        engines = [engine for engine in engines if engine.spans_nodes]
    if not engines:
        raise UsageError(
            f"--num-nodes {num_nodes}: {backend} cannot run on several nodes; use one node or another backend"
        )
    if start_method is None:
        return engines[0]
    for engine in engines:
        if engine.name == start_method:
            return engine
    where = "on several nodes " if num_nodes > 1 else "on GPUs " if start_method in start_methods else ""
    choice = _alternatives([engine.name for engine in engines])
    raise UsageError(f"--start-method {start_method}: {backend} is {where}started by {choice}")


def _alternatives(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def find_engine(name: str) -> Engine:
    """Looks up an engine by its name.

    Raises:
        UsageError: There is no such engine.
    """
    if name not in ENGINES:
        raise UsageError(f"start method {name!r}: there is no such engine; choose {', '.join(ENGINES)}")
    return ENGINES[name]
