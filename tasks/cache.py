"""Where prepared data, built wheels and rescued models are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.interface import TaskInputError


def cache_directory() -> Path:
    """Finds the directory of the cache, by the rules of the XDG Base Directory Specification.

    It is the value of LOCKSTEP_CACHE; without one, `lockstep` in XDG_CACHE_HOME; without that one, `~/.cache/lockstep`.
    An empty variable counts as one that is not set, and so does a relative XDG_CACHE_HOME, as the specification demands
    (https://specifications.freedesktop.org/basedir-spec/latest/).

    Returns:
        An absolute path, which need not exist yet.

    Raises:
        TaskInputError: The user has no home directory, and no variable names another one.
    """
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        # Unlike Path.expanduser, this keeps "~name" as it is where there is no such user.
        return Path(os.path.expanduser(chosen)).absolute()  # noqa: PTH111
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".cache").absolute() / "lockstep"
    except RuntimeError as error:
        raise TaskInputError(f"there is no home directory for the cache ({error}); set LOCKSTEP_CACHE") from error
