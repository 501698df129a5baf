"""The ranks of one node of a Horovod job; the other nodes start theirs with the same command."""

from __future__ import annotations

import sys

from typing_extensions import override

from launch.nodes import interface
from launch.starters.horovodrun import gloo_timeout
from launch.starters.interface import Ranks, Starter


class HorovodNode(Starter):
    """``python -m launch.starters.horovod_ranks``."""

    name = "horovod-node"
    launcher = "horovod-node"
    rank_variable = "HOROVOD_RANK"
    spans_nodes = True

    @override
    def command(self, ranks: Ranks) -> list[str]:
        nodes = ranks.nodes
        # With all ranks on one node, any free port works.
        port = ranks.port if nodes.num_nodes > 1 else ranks.master_port or 0
        return [
            *(sys.executable, "-m", "launch.starters.horovod_ranks", f"--num-processes={ranks.num_processes}"),
            *(f"--num-nodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}"),
            *(f"--master-addr={nodes.master_addr}", f"--master-port={port}"),
            *(f"--interface={interface(nodes)}", f"--timeout={ranks.timeout_seconds}"),
            *self.program(ranks),
        ]

    @override
    def environment(self, ranks: Ranks) -> dict[str, str]:
        return gloo_timeout(ranks)
