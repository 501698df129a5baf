"""torch.multiprocessing (https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses)."""

from __future__ import annotations

from typing_extensions import override

from launch.engines.interface import Engine, Ranks, launcher_module


class Spawn(Engine):
    """``python -m launch.engines.spawn_ranks``, whose children are the ranks."""

    name = "spawn"
    launcher = "spawn"
    rank_variable = "RANK"

    @override
    def command(self, ranks: Ranks) -> list[str]:
        port = [f"--master-port={ranks.master_port}"] if ranks.master_port is not None else []
        launcher = launcher_module(ranks, "launch.engines.spawn_ranks")
        return [*launcher, f"--num-processes={ranks.num_processes}", *port, *self.program(ranks)]
