"""The table of engines: the module and class of each, which are imported only when they are chosen."""

from __future__ import annotations

import importlib
from typing import Any

from engines.interface import Engine
from launch.errors import UsageError

ENGINES = {
    "kubernetes": "engines.kubernetes:Kubernetes",
    "mpi": "engines.mpi:Mpi",
    "netns": "engines.netns:Netns",
    "ray": "engines.ray:Ray",
    "slurm": "engines.slurm:Slurm",
}


def find_engine(name: str) -> type[Engine[Any]]:
    """Looks up an engine by its name.

    Raises:
        UsageError: There is no such engine.
    """
    if name not in ENGINES:
        raise UsageError(f"--engine {name}: there is no such engine; choose {', '.join(ENGINES)}")
    module, _, class_name = ENGINES[name].partition(":")
    engine: type[Engine[Any]] = getattr(importlib.import_module(module), class_name)
    return engine
