"""What is refused because of the machine that a command runs on, apart from what no machine can run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from backends.capabilities import UnsupportedError
from launch.errors import UsageError, one_line


@contextlib.contextmanager
def of_this_machine(noted: list[str] | None) -> Iterator[None]:
    """Surrounds checks that another machine may pass.

    Args:
        noted: Where a dry run notes what is refused, and goes on; None for a run, which ends with the refusal.
    """
    try:
        yield
    except (UsageError, UnsupportedError) as error:
        if noted is None:
            raise
        noted.append(one_line(error))
