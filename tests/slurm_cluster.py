"""A real cluster of SLURM whose nodes are all this machine (tests/slurm/cluster.sh), for the tests that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import skip_or_fail

CLUSTER = PROJECT_DIRECTORY / "tests" / "slurm" / "cluster.sh"
STATE = Path("/run/lockstep-slurm")


@contextmanager
def running_cluster() -> Iterator[None]:
    """A cluster with three idle nodes; without SLURM tests are skipped, with REQUIRE_SLURM=1 they fail."""
    reason = None
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        reason = "SLURM is not installed (slurm-wlm and munge)"
    elif os.getuid() != 0:
        reason = "only root can start the daemons of a cluster"
    skip_or_fail(reason, "REQUIRE_SLURM")
    was_running = (STATE / "slurmctld.pid").exists()
    subprocess.run([CLUSTER, "start"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(STATE / "slurm.conf"))
        yield
    if not was_running:
        subprocess.run([CLUSTER, "stop"], check=True)


def on_slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs the cluster, whose daemons must start and end everything themselves."""
    return pytest.mark.slurm(pytest.mark.processes(pytest.mark.usefixtures("slurm_cluster")(test)))


def slurm(*command: str) -> str:
    """Returns what a command of SLURM prints.

    Raises:
        subprocess.CalledProcessError: It has failed.
    """
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
