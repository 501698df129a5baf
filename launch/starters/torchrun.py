"""torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from launch.nodes import own_address
from launch.starters.interface import Ranks, Starter, launcher_module

# How long nodes that are enough wait for more of them, and when a node that is silent counts as having left; in
# seconds. The defaults are 30 and 15, in which the others would stand still. A node that is alive
# and counts as having left trains on alone, so that a machine which is busy for some seconds must not make it silent.
_LEAVING = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"


class Torchrun(Starter):
    """``torchrun``, started as a Python module."""

    name = "torchrun"
    launcher = "torchrun"
    rank_variable = "RANK"
    variables: ClassVar[tuple[str, ...]] = (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_", "PET_"),
    )
    spans_nodes = True
    is_elastic = True

    @override
    def command(self, ranks: Ranks) -> list[str]:
        command = [
            *launcher_module(ranks, "torch.distributed.run"),
            f"--nproc-per-node={ranks.num_local_processes}",
            f"--local-addr={own_address(ranks.nodes)}",
            f"--log-dir={ranks.log_directory / 'torchrun'}",
        ]
        if ranks.nodes.num_nodes > 1:
            command += _elastic(ranks) if ranks.nodes.may_leave else _fixed(ranks)
        elif ranks.master_port is None:
            command += ["--standalone"]
        else:
            command += ["--master-addr=127.0.0.1", f"--master-port={ranks.master_port}"]
        return [*command, "-m", *self.program(ranks)]

    @override
    def program(self, ranks: Ranks) -> list[str]:
        # Where nodes leave and return, the number of a rank changes, and its files keep the name of its place.
        return [*ranks.module, "LOCAL_RANK"] if ranks.nodes.may_leave else super().program(ranks)

    @override
    def environment(self, ranks: Ranks) -> dict[str, str]:
        # Otherwise a restart meets in what is left of the last store (https://github.com/pytorch/pytorch/issues/135712).
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ranks.nodes.may_leave else {}


def _fixed(ranks: Ranks) -> list[str]:
    """Nodes that stay meet in torchrun's static rendezvous, which numbers their ranks in the order of the nodes."""
    nodes = ranks.nodes
    return [
        *(f"--nnodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}"),
        *(f"--master-addr={nodes.master_addr}", f"--master-port={ranks.port}"),
        f"--rdzv-conf={static_rendezvous(ranks)}",
    ]


def _elastic(ranks: Ranks) -> list[str]:
    """Nodes that may leave meet in torchrun's c10d rendezvous, which orders them by their addresses, as text."""
    nodes, seconds = ranks.nodes, _seconds(ranks)
    waiting = f"is_host={int(nodes.node_rank == 0)},join_timeout={seconds},read_timeout={seconds}"
    return [
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.master_addr}:{ranks.port}"),
        *(f"--nnodes={nodes.min_nodes}:{nodes.num_nodes}", f"--max-restarts={ranks.max_restarts}"),
        f"--rdzv-conf={waiting},{_LEAVING}",
    ]


def static_rendezvous(ranks: Ranks) -> str:
    """Configures the rendezvous of nodes that stay: all wait as long as a collective may."""
    return f"timeout={_seconds(ranks)}"


def _seconds(ranks: Ranks) -> int:
    return max(1, round(ranks.timeout_seconds))
