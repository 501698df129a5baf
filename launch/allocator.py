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
from typing import NamedTuple

from launch.errors import UsageError
from records.environment import find_allocator

# By the name of an allocator that ranks can be given: its libraries, as the dynamic linker finds them, and the package
# of Debian that has one.
_LIBRARIES = {
    "tcmalloc": (("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"), "libtcmalloc-minimal4"),
    "jemalloc": (("libjemalloc.so.2",), "libjemalloc2"),
}


class Allocator(NamedTuple):
    """What ranks take memory with.

    Attributes:
        name: A value of --allocator, other than auto, or the name of another one that the user loads.
        library: What LD_PRELOAD is to load; None for nothing, or for nothing more than the user's own has.
    """

    name: str
    library: str | None

    @property
    def option(self) -> str:
        """The value of --allocator that stands for it: auto for one that only LD_PRELOAD can name."""
        return self.name if self.name in {ALLOCATOR_OF_C.name, *_LIBRARIES} else "auto"


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


def describe_allocator(asked: str) -> str | None:
    """Says what of the ranks' allocator is not as --allocator tells.

    Args:
        asked: The value of --allocator.

    Returns:
        A line that names one in LD_PRELOAD that does not load, or that the option does not know, or says that there is
        none but that of the C library, with the remedy; None where ranks have what was asked for.

    Raises:
        UsageError: As `settle_allocator`.
    """
    allocator = settle_allocator(asked)
    in_force = f"memory allocator: {allocator.name}"
    missing = [library for _, library in _preloaded() if not _loads(library)]
    if missing:
        return (
            f"{in_force}; LD_PRELOAD has {' and '.join(missing)}, which cannot be loaded here; "
            "install what is missing, or correct or unset LD_PRELOAD"
        )
    if allocator.name != allocator.option:
        return f"{in_force}, from LD_PRELOAD"
    if (asked, allocator) == ("auto", ALLOCATOR_OF_C):
        return f"{in_force}; install tcmalloc (on Debian libtcmalloc-minimal4) for faster steps"
    return None


def _preloaded() -> list[tuple[str, str]]:
    """Returns the allocators in the user's LD_PRELOAD in their order: of each, the name and the library."""
    libraries = re.split("[ :]+", os.environ.get("LD_PRELOAD", ""))  # as ld.so(8) separates them
    return [(name, library) for library in libraries if (name := find_allocator(library)) is not None]


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
