"""How the kernel is to schedule the threads of ranks, where the user does not say so (docs/speed.md)."""

from __future__ import annotations

from typing import Literal

from backends.capabilities import BackendSettings
from records.environment import num_cpus


def default_scheduling(
    settings: BackendSettings, *, device: str, start_method: str, num_ranks_here: int
) -> Literal["batch", "normal"]:
    """Returns what makes steps shorter.

    A thread that polls should be interrupted where it is in the way of another: where ranks outnumber cores, and in
    Open MPI, which has threads of its own. On GPUs nothing has been measured.

    Args:
        settings: The options of the backend.
        device: Where ranks compute: cpu or cuda.
        start_method: The name of what starts the ranks.
        num_ranks_here: How many ranks share this machine.
    """
    polls = settings.keeps_core_busy and (num_ranks_here > num_cpus() or start_method == "mpirun")
    return "normal" if polls or device != "cpu" else "batch"
