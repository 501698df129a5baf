"""Open MPI's mpirun (https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html)."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from typing_extensions import override

from launch.errors import UsageError
from launch.starters.interface import Ranks, Starter


class Mpirun(Starter):
    """``mpirun``, with all ranks on this machine."""

    name = "mpirun"
    launcher = "mpirun"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    variables = ("OMPI_COMM_", "OMPI_MCA_orte_", "OMPI_MCA_ess_", "OMPI_MCA_pmix")
    takes_port = False

    @override
    def check(self, ranks: Ranks) -> None:
        super().check(ranks)
        _find_mpirun()

    @override
    def command(self, ranks: Ranks) -> list[str]:
        command = [_find_mpirun(), "-np", str(ranks.num_processes), "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command += ["--allow-run-as-root"]
        # All ranks are on this machine: shared memory suffices, and nothing needs to listen on other interfaces.
        command += ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo"]
        return [*command, sys.executable, "-m", *self.program(ranks)]


def _find_mpirun() -> str:
    """Finds the command next to this interpreter, or else on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("mpirun is not installed; install Open MPI (Debian: openmpi-bin), or use horovodrun")
    return found
