"""Which backends communicate in a way of their own, so that it is worth measuring."""

from __future__ import annotations

from rich.console import Console

from backends.capabilities import UnsupportedError
from backends.registry import BACKENDS, BackendRow, find_backend


def measured_backends(names: list[str] | None) -> dict[str, BackendRow]:
    """Returns the backends to measure.

    Args:
        names: The backends that the user names; None for each that has a path of its own and can run here.

    Raises:
        UsageError, UnsupportedError: A backend does not exist, or cannot run here.
    """
    if names is None:
        return {
            name: row for name, row in BACKENDS.items() if row.has_own_collectives and row.unavailable_reason() is None
        }
    rows = {name: find_backend(name) for name in names}
    for name, row in rows.items():
        reason = row.unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"--backends {name}: cannot run here: {reason}")
    return rows


def say_what_is_left_out(terminal: Console) -> None:
    """Names the backends that can run here and are measured only if the user names them."""
    for name, row in BACKENDS.items():
        if row.communicates_like is not None and row.unavailable_reason() is None:
            terminal.print(f"{name} is left out: it communicates as {row.communicates_like} does (--backends {name})")
