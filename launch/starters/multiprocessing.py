"""torch.multiprocessing (https://docs.pytorch.org/docs/stable/multiprocessing.html): one process starts the ranks."""

from __future__ import annotations

from typing_extensions import override

from launch.starters.interface import Ranks, Starter, launcher_module


class Spawn(Starter):
    """Each rank is a new process, which imports all libraries."""

    name = "spawn"
    launcher = "spawn"
    rank_variable = "RANK"

    @override
    def command(self, ranks: Ranks) -> list[str]:
        launcher = launcher_module(ranks, "launch.starters.multiprocessing_ranks")
        command = [*launcher, f"--start-method={self.name}", f"--num-processes={ranks.num_processes}"]
        if ranks.master_port is not None:
            command += [f"--master-port={ranks.master_port}"]
        return [*command, *self.program(ranks)]


class Fork(Spawn):
    """Each rank is a copy of one process, which imports most of what they need once for all.

    A copy of a process cannot use CUDA (https://docs.pytorch.org/docs/stable/notes/multiprocessing.html).
    """

    name = "fork"
    launcher = "fork"
    devices = ("cpu",)
