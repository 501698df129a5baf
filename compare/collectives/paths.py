"""Which backends communicate in a way of their own, so that it is worth measuring."""

from __future__ import annotations

from rich.console import Console

from backends.interface import UnsupportedError
from backends.registry import BACKENDS, BackendRow, find_backend

# They reduce through torch.distributed's group themselves, so that ddp's path is theirs.
ON_THE_PATH_OF_DDP = ("apex", "accelerate")
# The backends whose library communicates in a way of its own.
PATHS = tuple(
    name for name, row in BACKENDS.items() if row.capabilities.max_world_size is None and name not in ON_THE_PATH_OF_DDP
)


def measured_backends(names: list[str] | None) -> dict[str, BackendRow]:
    """Returns the backends to measure.

    Args:
        names: The backends that the user names; None for each that has a path of its own and can run here.

    Raises:
        UsageError, UnsupportedError: A backend does not exist, or cannot run here.
    """
    if names is None:
        return {name: row for name, row in BACKENDS.items() if name in PATHS and row.unavailable_reason() is None}
    rows = {name: find_backend(name) for name in names}
    for name, row in rows.items():
        reason = row.unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"--backends {name}: cannot run here: {reason}")
    return rows


def say_what_is_left_out(terminal: Console) -> None:
    """Names the backends that can run here and are measured only if the user names them."""
    for name in ON_THE_PATH_OF_DDP:
        if BACKENDS[name].unavailable_reason() is None:
            terminal.print(
                f"{name} is left out: it communicates as ddp does, through torch.distributed (--backends {name})"
            )
