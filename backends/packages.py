"""Where packages are installed, without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def package_directory(name: str) -> Path | None:
    """Returns the directory of a package; None if it is not installed."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
