"""The memory allocator of the ranks: that of the C library, or another one that is loaded before it.

A training step takes and returns hundreds of blocks. glibc gives large ones back to the kernel, which must clear their
pages again at the next step; tcmalloc and jemalloc keep them. PyTorch's tuning guide recommends either on CPUs
(https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from launch.errors import UsageError

# By the name of an allocator: its libraries, as the dynamic linker finds them, and the package of Debian that has one.
_LIBRARIES = {
    "tcmalloc": (("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"), "libtcmalloc-minimal4"),
    "jemalloc": (("libjemalloc.so.2",), "libjemalloc2"),
}


class Allocator(NamedTuple):
    """What ranks take memory with.

    Attributes:
        name: A value of --allocator, other than auto.
        library: What LD_PRELOAD is to load; None for nothing, or for nothing more than the user's own has.
    """

    name: str
    library: str | None


ALLOCATOR_OF_C = Allocator("glibc", None)


def settle_allocator(asked: str) -> Allocator:
    """Returns the allocator that the user asks for or has in LD_PRELOAD, or with "auto" the best that is installed.

    Raises:
        UsageError: It cannot be loaded here, or LD_PRELOAD has another one.
    """
    for name, library in _preloaded():
        if _loads(library):
            if asked not in ("auto", name):
                raise UsageError(f"--allocator {asked}: LD_PRELOAD has {library}; unset it, or leave the option out")
            return Allocator(name, None)
    if asked == "glibc":
        return ALLOCATOR_OF_C
    for name, (libraries, _) in _LIBRARIES.items():
        for library in libraries if asked in ("auto", name) else ():
            if _loads(library):
                return Allocator(name, library)
    if asked == "auto":
        return ALLOCATOR_OF_C
    libraries, package = _LIBRARIES[asked]
    raise UsageError(
        f"--allocator {asked}: {' and '.join(libraries)} cannot be loaded here; install it (on Debian {package}), or "
        "leave the option out"
    )


def describe_fallback(asked: str, settled: str) -> str | None:
    """Says that an allocator in LD_PRELOAD does not load, or that none but that of the C library does.

    Args:
        asked: The value of --allocator.
        settled: The name of the allocator that ranks have.

    Returns:
        A line with the remedy; None where ranks have what was asked for.
    """
    missing = [library for _, library in _preloaded() if not _loads(library)]
    if missing:
        return (
            f"memory allocator: {settled}; LD_PRELOAD has {' and '.join(missing)}, which cannot be loaded here; "
            "install what is missing, or correct or unset LD_PRELOAD"
        )
    if (asked, settled) == ("auto", ALLOCATOR_OF_C.name):
        return f"memory allocator: {settled}; install tcmalloc (on Debian libtcmalloc-minimal4) for faster steps"
    return None


def _preloaded() -> list[tuple[str, str]]:
    """Returns the allocators in the user's LD_PRELOAD in their order: of each, the name and the library."""
    libraries = re.split("[ :]+", os.environ.get("LD_PRELOAD", ""))  # as ld.so(8) separates them
    return [(name, library) for library in libraries for name in _LIBRARIES if name in Path(library).name]


def _loads(library: str) -> bool:
    """Whether the dynamic linker loads a library: it only warns, and starts the program without it."""
    program = shutil.which("true")
    if program is None:
        return False
    try:
        done = subprocess.run([program], env={**os.environ, "LD_PRELOAD": library}, capture_output=True, check=False)
    except OSError:  # the system allows no further process, which starting the ranks will tell
        return False
    return done.returncode == 0 and not done.stderr
