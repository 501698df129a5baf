"""The options of Horovod, what it supports and where it runs; importing them imports no torch."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from backends.capabilities import PRECISIONS, BackendSettings, Capabilities, UnsupportedError
from backends.packages import package_directory

# Of the libraries in which Horovod was built to reduce, if it was: a function that its own library then calls.
_NCCL, _MPI = b"ncclAllReduce", b"MPI_Allreduce"


class HorovodSettings(BackendSettings):
    """Options of Horovod's adapter."""

    of_collectives: ClassVar[frozenset[str]] = frozenset({"wait"})
    wait: Literal["spin", "sleep"] = Field(
        "spin",
        description="what a rank does until a reduction is done: spin, as Horovod is released, which takes a core, or "
        "sleep, and look every 0.1 ms",
    )

    @property
    @override
    def keeps_core_busy(self) -> bool:
        return self.wait == "spin"

    @override
    def check_machine(self, *, start_method: str) -> None:
        fusion_threshold()
        cycle_time()
        if start_method == "mpirun" and horovod_missing() is None and not _was_built_with(_MPI):
            raise UnsupportedError(
                "--start-method mpirun: horovod was built without MPI; install Open MPI (Debian: libopenmpi-dev), "
                "uninstall horovod and run launch/run.sh horovod, or leave the option out"
            )


def horovod_missing() -> str | None:
    """Says in one line why Horovod cannot run here, or None."""
    build = (
        "run launch/run.sh horovod, which builds 0.28.1 (about 2 minutes; needs g++, CMake, make and Python's headers)"
    )
    package = package_directory("horovod")
    if package is None:
        return f"horovod is not built; {build}"
    if not any((package / "torch").glob("mpi_lib*.so")):
        return f"horovod was built without its PyTorch extension; uninstall it and {build}"
    return None


def horovod_capabilities() -> Capabilities:
    """Returns what Horovod supports; without GPU operations it refuses CUDA tensors."""
    has_nccl = _was_built_with(_NCCL)
    return Capabilities(
        {"cpu": PRECISIONS, **({"cuda": PRECISIONS} if has_nccl else {})},
        gpus_depend_on_build=True,
        start_methods=("horovodrun", "mpirun", "horovod-node", "horovod-torchrun"),
        compressions=("fp16",),
        reasons={} if has_nccl else {"cuda": "it was built without NCCL; set it up where nvcc is installed"},
    )


def _was_built_with(function: bytes) -> bool:
    package = package_directory("horovod")
    libraries = (package / "torch").glob("mpi_lib*.so") if package else ()
    return any(function in library.read_bytes() for library in libraries)


def fusion_threshold() -> int:
    """Returns how many bytes Horovod reduces at once.

    Raises:
        UnsupportedError: The variable that says so is no whole number.
    """
    return int(_number_in("HOROVOD_FUSION_THRESHOLD", 128 * 1024 * 1024, whole=True))


def cycle_time() -> float:
    """Returns after how many milliseconds Horovod looks again for something to reduce.

    Raises:
        UnsupportedError: The variable that says so is no number.
    """
    return _number_in("HOROVOD_CYCLE_TIME", 1.0)


def _number_in(variable: str, default: float, *, whole: bool = False) -> float:
    """Returns the number in a variable that Horovod reads. It has no function that returns it, and these defaults.

    Raises:
        UnsupportedError: It is no number. Horovod would take what comes before the first other character.
    """
    text = os.environ.get(variable)
    try:
        return default if text is None else int(text) if whole else float(text)
    except ValueError as error:
        kind = "a whole number" if whole else "a number"
        raise UnsupportedError(f"{variable}={text}: is not {kind}; correct it, or unset it") from error
