"""How a rank waits for Horovod: by polling without a pause, as Horovod is released, or asleep.

Each function of Horovod's that waits calls the same one of its extension, which polls in a loop around
`std::this_thread::yield()` (`WaitAndClear` in horovod/torch/mpi_ops_v2.cc).
"""

from __future__ import annotations

import time

from horovod.torch import mpi_ops

# By default, Horovod looks for something to reduce every millisecond, so that a tenth of that adds little.
_SECONDS_BETWEEN_LOOKS = 1e-4

_spin = mpi_ops.mpi_lib.horovod_torch_wait_and_clear


def set_waiting(*, sleeps: bool) -> None:
    """Has this process sleep while it waits for Horovod, or spin, as Horovod does by itself."""
    mpi_ops.mpi_lib.horovod_torch_wait_and_clear = _sleep if sleeps else _spin


def waiting() -> str:
    """Returns how this process waits for Horovod: "spin" or "sleep"."""
    return "sleep" if mpi_ops.mpi_lib.horovod_torch_wait_and_clear is _sleep else "spin"


def _sleep(handle: int) -> None:
    while not mpi_ops.poll(handle):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _spin(handle)  # which returns at once, or raises the error of the reduction
