"""Whether the disk has room for what a run will write."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from records.checkpoint import list_checkpoints
from records.config import RunConfig

if TYPE_CHECKING:
    from torch import nn

MIB = 2**20
# Room for the header of a file of weights; and for a tokenizer, the record and the logs.
_HEADER_BYTES = 64 * 1024
SLACK_BYTES = MIB


def free_bytes(directory: Path) -> int:
    """Returns how many bytes the file system of a directory says are left for this user; 0 if it does not answer."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize  # some do not say how large they are


def is_in_memory(directory: Path) -> bool:
    """Returns whether a directory lies in memory, and is lost with the machine: tmpfs(5), proc_pid_mountinfo(5)."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def model_bytes(model: nn.Module) -> int:
    """Returns about how many bytes a saved model takes."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _HEADER_BYTES


def require_room(config: RunConfig, directory: Path, model: nn.Module, *, num_steps: int) -> str | None:
    """Makes sure that there is room for the trained model.

    All existing checkpoints but the newest count as room for the model, since they are removed if it needs the room.

    Returns:
        A warning if there is no room for the checkpoints beside the model; else None.

    Raises:
        OSError: There is no room for the model.
    """
    needed, free = model_bytes(model) + SLACK_BYTES, free_bytes(directory)
    sizes = [path.stat().st_size for path in list_checkpoints(directory)]
    if free + sum(sizes[1:]) < needed:
        raise OSError(
            f"--output-dir {directory}: {_mib(free)} MiB are free, but the model takes {_mib(needed)} MiB; "
            "make room, or choose another directory"
        )
    for_checkpoints = checkpoint_bytes(config, model) * _num_checkpoints(config, num_steps)
    if free + sum(sizes) >= needed + for_checkpoints:
        return None
    return (
        f"{_mib(free)} MiB are free in {directory}, but the model and its checkpoints take about "
        f"{_mib(needed + for_checkpoints)} MiB; make room, or lower --keep"
    )


def checkpoint_bytes(config: RunConfig, model: nn.Module) -> int:
    """Returns about how many bytes a checkpoint takes, with weights and the state of the optimizer."""
    copies = 3 if config.optimizer == "adamw" else 2 if config.momentum else 1
    return sum(copies * parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _num_checkpoints(config: RunConfig, num_steps: int) -> int:
    """Returns how many checkpoints are on the disk at most; an old one is removed after the new one is complete."""
    interval = config.save_interval
    if interval is None:
        return 0
    best = int(config.metric_for_best_model is not None)
    in_all = (num_steps - 1) // interval.steps if interval.steps is not None else num_steps
    return min(config.keep + 1, in_all) + best


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"
