"""The interface of an engine, which starts the nodes of a job."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from launch.errors import UsageError
from records.config import RunOptions


class EngineSettings(BaseModel):
    """The options of an engine; each engine declares its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def sizes(self) -> dict[str, int]:
        """Returns what these options say of `num_nodes` and `num_processes`; nothing, unless an engine overrides it."""
        return {}

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of each node for which these options ask."""
        return 0

    @property
    def num_cpus(self) -> int | None:
        """The number of cores of each node for which these options ask; None where they leave that open."""
        return None

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on a node for which these options ask, if --num-processes does not say it."""
        return self.num_gpus or 1


def node_directory(output_dir: Path, node_rank: int) -> Path:
    """Returns the output directory of a node's command in the directory of its job."""
    return output_dir / f"node{node_rank}"


@dataclass(frozen=True)
class NodeJob:
    """What an engine is to start: on each node the same command, except for the number of the node.

    The command is that of a training on several nodes (docs/nodes.md): it starts the ranks of its node, watches them,
    and meets the commands of the other nodes.

    Attributes:
        backend: The backend.
        options: The options of the training, with those that a resumed run takes over, and without those that differ
            between nodes.
        run: The same options, validated.
        num_nodes: The number of nodes.
        num_processes: The number of ranks on all nodes together.
        output_dir: The directory of the job; that of a node is in it.
        device: "cuda" if the ranks are known to compute on GPUs; else "cpu", although nodes may find and use some.
        program: The command line, and its first arguments, if that is not Lockstep's own.
    """

    backend: str
    options: tuple[str, ...]
    run: RunOptions
    num_nodes: int
    num_processes: int
    output_dir: Path
    device: str
    program: tuple[str, ...] = field(default_factory=lambda: (sys.executable, "-m", "launch"))

    @property
    def num_local_processes(self) -> int:
        """The number of ranks on each node."""
        return self.num_processes // self.num_nodes

    @property
    def logs(self) -> list[Path]:
        """Where the output of each node's command goes, in the order of the nodes."""
        return [self.output_dir / f"node{node_rank}.log" for node_rank in range(self.num_nodes)]

    def directory(self, node_rank: int) -> str:
        """Returns the output directory of a node's command."""
        return str(node_directory(self.output_dir, node_rank))

    def words(self, node_rank: int, master_addr: str) -> list[str]:
        """Returns the command line for a node.

        Args:
            node_rank: The number of the node.
            master_addr: An address of node 0.
        """
        own = [f"--output-dir={self.directory(node_rank)}"]
        if self.num_nodes > 1:
            own += [f"--node-rank={node_rank}", f"--master-addr={master_addr}"]
        return [*self._same_on_all(), *own]

    def shell_line(self, node_rank: str, master_addr: str) -> str:
        """Returns the command line as a line for a shell, the same on all nodes.

        Args:
            node_rank: The variable that holds the number of a node, as ``$NODE_RANK``.
            master_addr: The variable that holds an address of node 0, or the address.
        """
        own = [f"--output-dir={shlex.quote(str(self.output_dir))}/node{_expanded(node_rank)}"]
        if self.num_nodes > 1:
            own += [f"--node-rank={_expanded(node_rank)}", f"--master-addr={_expanded(master_addr)}"]
        return " ".join([shlex.join(self._same_on_all()), *own])

    def _same_on_all(self) -> list[str]:
        sizes = [f"--num-processes={self.num_processes}"]
        if self.num_nodes > 1:
            sizes.append(f"--num-nodes={self.num_nodes}")
        return [*self.program, self.backend, *self.options, *sizes]


def check_node(job: NodeJob, *, num_gpus: int, num_cpus: int | None, option: str) -> None:
    """Refuses nodes that are asked for other GPUs or fewer cores than their ranks need.

    Args:
        job: The job.
        num_gpus: For how many GPUs of each node --gpus-per-node asks.
        num_cpus: For how many cores of each node `option` asks; None for as many as are needed.
        option: The option that asks for cores.

    Raises:
        UsageError: They are.
    """
    num_ranks, asked = job.num_local_processes, job.run.device
    if num_cpus is not None and num_cpus < num_ranks:
        raise UsageError(f"{option} {num_cpus}: a node runs {num_ranks} ranks; give each of them one")
    if num_gpus and asked == "cpu":
        raise UsageError(f"--gpus-per-node {num_gpus}: has no effect with --device cpu; leave one of them out")
    if not num_gpus and asked == "cuda":
        raise UsageError(
            f"--device cuda: --gpus-per-node is missing; give it (--gpus-per-node {num_ranks}), or leave both out"
        )
    if not num_gpus and job.device == "cuda":
        raise UsageError(
            f"--gpus-per-node: is missing, and {job.backend} computes on GPUs only; give it (--gpus-per-node "
            f"{num_ranks}), or choose another backend"
        )


def _expanded(variable: str) -> str:
    """Quotes a variable for a shell, which still replaces it by its value."""
    return f'"{variable}"'


_Settings = TypeVar("_Settings", bound=EngineSettings)


class Engine(ABC, Generic[_Settings]):
    """An engine: a cluster, or what stands for one, and how a job is given to it.

    Attributes:
        name: Its name for --engine.
        summary: What it is, in a few words.
        Settings: Its options.
        is_here: Whether all nodes are on this machine.
        shares_files: Whether a path of this machine is the same file for the nodes, as a rule.
        gives_cores: Whether it gives a node as many cores as its ranks have threads, or says that it has not so many.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Settings: ClassVar[type[EngineSettings]] = EngineSettings
    is_here: ClassVar[bool] = False
    shares_files: ClassVar[bool] = True
    gives_cores: ClassVar[bool] = True

    def __init__(self, job: NodeJob, settings: _Settings) -> None:
        """Keeps the job and the engine's options; nothing is started."""
        self.job = job
        self.settings = settings

    def check(self) -> None:
        """Refuses what the engine could not do anywhere; called before all else.

        Raises:
            UsageError: The text says what and why.
        """

    def check_here(self) -> None:
        """Refuses what cannot be started from this machine; called before anything is created, but not by --dry-run.

        Raises:
            UsageError: The text says what is missing.
        """

    @abstractmethod
    def script(self) -> str:
        """Returns what --dry-run prints: the script or the manifests that `run` gives to the cluster."""

    @abstractmethod
    def run(self) -> int:
        """Starts the job, shows what its nodes print, and returns its exit code when it has ended.

        If a signal ends this command, the job is ended, too.

        Raises:
            UsageError: It cannot be started here.
        """
