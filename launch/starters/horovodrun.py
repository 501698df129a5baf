"""horovodrun (https://horovod.readthedocs.io/en/stable/running_include.html)."""

from __future__ import annotations

import sys

from typing_extensions import override

from launch.starters.interface import Ranks, Starter


class Horovodrun(Starter):
    """``horovodrun --gloo``, started as a Python module, without a check that takes seconds."""

    name = "horovodrun"
    launcher = "horovodrun"
    rank_variable = "HOROVOD_RANK"
    variables = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_TIMEOUT_SECONDS")
    takes_port = False

    @override
    def command(self, ranks: Ranks) -> list[str]:
        # Loopback only: otherwise it first looks for an interface that all hosts share.
        options = ["-np", str(ranks.num_processes), "--gloo", "--network-interfaces", "lo"]
        launcher = [sys.executable, "-m", "launch.starters.horovodrun_unchecked"]
        return [*launcher, *options, sys.executable, "-m", *self.program(ranks)]

    @override
    def environment(self, ranks: Ranks) -> dict[str, str]:
        return gloo_timeout(ranks)


def gloo_timeout(ranks: Ranks) -> dict[str, str]:
    """Lets Horovod's ranks wait for each other as long as a collective may."""
    return {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(ranks.timeout_seconds)))}
