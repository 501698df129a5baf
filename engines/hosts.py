"""What engines that reach hosts by a program or a library give to each of them, and what they hear from there."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys

from engines.interface import NodeJob
from launch.starters.environment import command_environment
from records.environment import noted_variables

# The variables that a host gets from the user's environment beside those that a record notes, by how their names begin.
_PASSED_ON = ("PATH", "LD_", "PYTHON", "LOCKSTEP_", "XDG_CACHE_HOME", "HF_")
# mpirun has read those, and the ranks of a host are to see none of them.
_NOT_PASSED_ON = ("OMPI_",)


def on_host(job: NodeJob, node_rank: int, words: list[str]) -> list[str]:
    """Returns what is to run on a host.

    Args:
        job: The job.
        node_rank: The number of the node.
        words: The command line of the node.
    """
    return [sys.executable, "-m", "engines.on_host", str(node_rank), str(job.logs[node_rank]), *words]


def host_environment() -> dict[str, str]:
    """Returns the variables of this process that each host needs."""
    passed_on = (*_PASSED_ON, *noted_variables())
    return {
        name: value
        for name, value in command_environment().items()
        if name.startswith(passed_on) and not name.startswith(_NOT_PASSED_ON)
    }


@functools.cache
def address_of(host: str) -> str:
    """Returns the address of a host.

    Inside a job of SLURM that is what SLURM knows, if nothing else does: names of its nodes need not resolve.

    Raises:
        OSError, UnicodeError: The name cannot be resolved.
    """
    try:
        return socket.gethostbyname(host)
    except OSError:
        address = _address_in_slurm(host) if "SLURM_JOB_ID" in os.environ else None
        if address is None:
            raise
        return socket.gethostbyname(address)


def _address_in_slurm(host: str) -> str | None:
    command = ["scontrol", "show", "node", "--oneliner", host]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
    except FileNotFoundError:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else None


def told_codes(output: str) -> dict[int, int]:
    """Returns the exit codes by the numbers of the nodes, from what has been told on standard output."""
    return {int(node): int(code) for node, code in re.findall(r"(?m)^node (\d+) ends with (\d+)$", output)}
