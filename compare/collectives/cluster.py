"""The nodes of an engine, where ranks that measure collectives can be started instead of on this one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.devices import count_gpus
from compare.collectives.measurement import Measurement
from compare.collectives.selection import who_has
from compare.networks import UNLIMITED
from engines.command import planned
from engines.interface import Engine, EngineSettings
from engines.netns import NetnsSettings
from engines.registry import ENGINES, find_engine
from launch.arguments import Parser
from launch.errors import UsageError
from launch.options import add_options, option_words, validated
from launch.quantities import format_bandwidth

# Its nodes are processes of this machine, whose cores and GPUs they share.
_ON_THIS_MACHINE = "netns"
# Its pods see no file of this machine, so that their ranks could not read what to measure.
_WITHOUT_FILES = "kubernetes"


@dataclass(frozen=True)
class Cluster:
    """What starts the ranks, and where.

    Attributes:
        engine: The name of the engine.
        settings: Its options.
        words: The same options as the user has written them.
        num_nodes: For how many nodes the user asks; None for one for each rank, or for each group of GPUs.
    """

    engine: str
    settings: EngineSettings
    words: tuple[str, ...]
    num_nodes: int | None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the nodes are other machines than this one."""
        return self.engine != _ON_THIS_MACHINE

    @property
    def num_processes(self) -> int:
        """The number of ranks, if the user does not say it."""
        of_engine = self.settings.sizes()
        num_nodes = of_engine.get("num_nodes", self.num_nodes or 2)
        return of_engine.get("num_processes", num_nodes * self.settings.ranks_per_node)

    def nodes_of(self, num_processes: int) -> int:
        """Returns the number of nodes of so many ranks."""
        default = self.num_nodes or math.ceil(num_processes / self.settings.ranks_per_node)
        return self.settings.sizes().get("num_nodes", default)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of a node: those that the engine is asked for, or else as many as this machine has."""
        return int(getattr(self.settings, "gpus_per_node", count_gpus()) or 0)

    @property
    def network(self) -> str:
        """What limits nodes on this machine, as forecasts write it (1gbit,latency=5ms); else the name of the engine."""
        if not isinstance(self.settings, NetnsSettings):
            return self.engine
        settings = self.settings
        words = [UNLIMITED if settings.bandwidth is None else format_bandwidth(settings.bandwidth)]
        words += [f"latency={settings.latency * 1e6:g}us"] if settings.latency else []
        words += [f"loss={100 * settings.loss:g}%"] if settings.loss else []
        return ",".join(words)

    def options(self, measurement: Measurement) -> list[str]:
        """Returns the options of a training on these nodes whose ranks measure instead."""
        num_nodes = [f"--num-nodes={self.nodes_of(measurement.num_processes)}"]
        return [
            f"--engine={self.engine}",
            # Ranks that compute on CPUs need no GPUs.
            *(word for word in self.words if measurement.device == "cuda" or not word.startswith("--gpus-per-node=")),
            # There is no checkpoint to continue from.
            *(["--no-requeue"] if "requeue" in type(self.settings).model_fields else ()),
            # Where the engine's options name the nodes, it refuses another number that the user gives.
            *(num_nodes if "num_nodes" not in self.settings.sizes() or self.num_nodes is not None else ()),
            *(f"--num-processes={measurement.num_processes}", f"--device={measurement.device}"),
            *(f"--threads-per-rank={measurement.threads_per_rank}", f"--timeout={measurement.timeout}"),
            f"--start-method={measurement.start_method}",
            # Of the training, which never begins.
            *("--task=token-tagging", f"--global-batch-size={measurement.num_processes}", "--save-every=never"),
        ]

    def check(self, measurements: Sequence[Measurement]) -> None:
        """Refuses what the engine cannot start.

        Raises:
            UsageError: The text says why.
        """
        engine: Engine[Any] | None = None
        for measurement in measurements:
            engine, _ = planned([measurement.backend, *self.options(measurement)])
            engine.check()
        if engine is not None:
            engine.check_here()


def add_engine_options(parser: Parser, arguments: Sequence[str]) -> type[EngineSettings] | None:
    """Adds the options of the engine that the arguments name; returns what they are, None if no engine is named.

    Raises:
        UsageError: There is no such engine, or it cannot be used for this.
    """
    first_look = Parser("allreduce", add_help=False)
    first_look.add_argument("--engine")
    name = first_look.parse_known_args(list(arguments))[0].engine
    if name is None:
        return None
    if name == _WITHOUT_FILES:
        others = ", ".join(engine for engine in ENGINES if engine != _WITHOUT_FILES)
        raise UsageError(f"--engine {name}: its pods could not read what to measure; choose {others}")
    settings = find_engine(name).Settings
    add_options(parser, {f"engine {name}": settings})
    return settings


def parse(parser: Parser, arguments: Sequence[str], settings: type[EngineSettings] | None) -> dict[str, Any]:
    """Reads the command line; an option of an engine that is not named is refused with the engine's name."""
    namespace, unknown = parser.parse_known_args(list(arguments))
    name = unknown[0].partition("=")[0].removeprefix("--").replace("-", "_") if unknown else ""
    engines = [engine for engine in ENGINES if name in find_engine(engine).Settings.model_fields] if unknown else []
    if settings is None and engines:
        raise UsageError(f"{' '.join(unknown)}: only for nodes; add --engine {' or '.join(engines)}")
    if backends := who_has(name):
        raise UsageError(
            f"{' '.join(unknown)}: this option belongs to {' or '.join(backends)}; name that backend alone "
            f"(--backends {backends[0]})"
        )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return vars(namespace)


def cluster_of(
    engine: str | None, num_nodes: int | None, settings: type[EngineSettings] | None, asked: Mapping[str, Any]
) -> Cluster | None:
    """Returns where ranks are to be started; None if that is on this node.

    Args:
        engine: The name of the engine, if the user names one.
        num_nodes: For how many nodes the user asks.
        settings: What the options of the engine are.
        asked: The options that the user gives, by their names.

    Raises:
        UsageError: An option of the engine cannot be used.
    """
    if engine is None or settings is None:
        return None
    given = {name: value for name, value in asked.items() if name in settings.model_fields}
    return Cluster(engine, validated(settings, given), tuple(option_words(given)), num_nodes)
