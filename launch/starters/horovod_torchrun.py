"""torchrun's agents around the ranks of Horovod, on nodes that may leave the job and return to it.

Horovod's own elastic mode has one driver start the ranks of all nodes through ssh. Here each node starts its own, and
torchrun's agents agree which nodes are there, as they do for other backends.
"""

from __future__ import annotations

from typing_extensions import override

from launch.errors import UsageError
from launch.starters.horovodrun import Horovodrun, gloo_timeout
from launch.starters.interface import Ranks
from launch.starters.torchrun import Torchrun


class HorovodTorchrun(Torchrun):
    """``torchrun``, whose ranks meet through Horovod."""

    name = "horovod-torchrun"
    variables = (*Torchrun.variables, *Horovodrun.variables)

    @override
    def check(self, ranks: Ranks) -> None:
        super().check(ranks)
        if not ranks.nodes.may_leave:
            raise UsageError(
                f"--start-method {self.name}: starts ranks on nodes that may leave; add --min-nodes, or leave it out"
            )

    @override
    def program(self, ranks: Ranks) -> list[str]:
        return ["launch.starters.horovod_member", *super().program(ranks)]

    @override
    def environment(self, ranks: Ranks) -> dict[str, str]:
        return super().environment(ranks) | gloo_timeout(ranks)
