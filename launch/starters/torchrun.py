"""torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

from __future__ import annotations

from typing_extensions import override

from launch.nodes import own_address
from launch.starters.interface import Ranks, Starter, launcher_module


class Torchrun(Starter):
    """``torchrun``, started as a Python module."""

    name = "torchrun"
    launcher = "torchrun"
    rank_variable = "RANK"
    variables = (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_", "PET_"),
    )
    spans_nodes = True

    @override
    def command(self, ranks: Ranks) -> list[str]:
        command = [
            *launcher_module(ranks, "torch.distributed.run"),
            f"--nproc-per-node={ranks.num_local_processes}",
            f"--local-addr={own_address(ranks.nodes)}",
            f"--log-dir={ranks.log_directory / 'torchrun'}",
        ]
        if ranks.nodes.num_nodes > 1:
            command += [f"--nnodes={ranks.nodes.num_nodes}", "--rdzv-backend=c10d", f"--rdzv-conf={rendezvous(ranks)}"]
            command += [f"--rdzv-endpoint={ranks.nodes.master_addr}:{ranks.port}"]
        elif ranks.master_port is None:
            command += ["--standalone"]
        else:
            command += ["--master-addr=127.0.0.1", f"--master-port={ranks.master_port}"]
        return [*command, "-m", *self.program(ranks)]


def rendezvous(ranks: Ranks) -> str:
    """Configures the rendezvous of several nodes: node 0 is the host, and all wait as long as a collective may."""
    seconds = max(1, round(ranks.timeout_seconds))
    return f"is_host={int(ranks.nodes.node_rank == 0)},join_timeout={seconds},read_timeout={seconds}"
