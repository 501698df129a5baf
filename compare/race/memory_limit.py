"""How much memory the programs of a race may take: that which is free, or less of it in a container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """Where a control group tells of the memory of its processes.

    Attributes:
        limit: The file of what they may take together.
        usage: The file of what they take.
        facts: The file that divides this.
        given_back: What of it the kernel gives back when memory is short, as the last file calls it.
    """

    limit: Path
    usage: Path
    facts: Path
    given_back: str


_GROUPS = Path("/sys/fs/cgroup")
# Those of a container, in version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html) and in version 1. What the
# kernel keeps of files, and has not been used lately, it gives back before it ends a program.
GROUPS = (
    ControlGroup(_GROUPS / "memory.max", _GROUPS / "memory.current", _GROUPS / "memory.stat", "inactive_file"),
    ControlGroup(
        _GROUPS / "memory" / "memory.limit_in_bytes",
        _GROUPS / "memory" / "memory.usage_in_bytes",
        _GROUPS / "memory" / "memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes() -> int:
    """Returns how much memory programs may still take."""
    import psutil

    free: int = psutil.virtual_memory().available
    return max(0, min([free, *(limit - taken for limit, taken in _limits())]))


def is_limited() -> bool:
    """Whether a control group gives this process less memory than the machine has."""
    import psutil

    return any(limit < psutil.virtual_memory().total for limit, _ in _limits())


def _limits() -> Iterator[tuple[int, int]]:
    """Yields the limit of each control group that has one, and what is taken of it, in bytes."""
    for group in GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            yield int(group.limit.read_text()), _taken(group)


def _taken(group: ControlGroup) -> int:
    """Returns what the processes of a control group take and would not be given back; 0 if it does not tell."""
    try:
        usage = int(group.usage.read_text())
    except (OSError, ValueError):
        return 0
    try:
        facts = dict(line.split(maxsplit=1) for line in group.facts.read_text().splitlines())
        given_back = int(facts[group.given_back])
    except (OSError, ValueError, KeyError):
        given_back = 0
    return max(0, usage - given_back)
