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
ADVICE = "glibc; install tcmalloc (on Debian libtcmalloc-minimal4) for faster steps"


def settle_allocator(asked: str) -> Allocator:
    """Returns the allocator that the user asks for or has in LD_PRELOAD, or with "auto" the best that is installed.

    Raises:
        UsageError: It cannot be loaded here, or LD_PRELOAD has another one.
    """
    for library in re.split("[ :]+", os.environ.get("LD_PRELOAD", "")):  # as ld.so(8) separates them
        own = next((name for name in _LIBRARIES if name in Path(library).name and _loads(library)), None)
        if own not in (None, asked) and asked != "auto":
            raise UsageError(f"--allocator {asked}: LD_PRELOAD has {library}; unset it, or leave the option out")
        if own is not None:
            return Allocator(own, None)
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
    """Says that ranks have the allocator of the C library because no other one loads; None otherwise."""
    return f"memory allocator: {ADVICE}" if (asked, settled) == ("auto", ALLOCATOR_OF_C.name) else None


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
