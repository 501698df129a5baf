"""The table of engines."""

from __future__ import annotations

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


def find_engine(name: str) -> Engine:
    """Looks up an engine by its name.

    Raises:
        UsageError: There is no such engine.
    """
    if name not in ENGINES:
        raise UsageError(f"start method {name!r}: there is no such engine; choose {', '.join(ENGINES)}")
    return ENGINES[name]
