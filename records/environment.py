"""Where a run takes place: the machine, its software, and the variables that change what libraries compute."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from backends.registry import BACKENDS, find_backend
from records.config import NETWORK_VARIABLE
from records.record import Environment

# Of every run; those of the backends are added.
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy")

# Beginnings of the variables that a record notes, of every run; those of the backends are added.
VARIABLES = (
    *("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH_", "PYTORCH_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_"),
    *("TOKENIZERS_PARALLELISM", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD"),
)
# How the names of those end that say where files are on this machine, such as CUDA_HOME: a record does not note them.
_PLACES = ("_HOME", "_PATH", "_ROOT", "_DIR")

# How the files of memory allocators are named. That of oneTBB has its proxy take the place of the C library's.
_ALLOCATORS = re.compile(r"(?:^|/)(?:lib)?(tcmalloc|jemalloc|mimalloc|hoard|snmalloc|tbbmalloc(?=_proxy))[^/\n]*\.so\b")


def describe_environment(*, with_torch: bool) -> Environment:
    """Describes this machine; with CUDA and GPUs only where torch is loaded anyway."""
    commit, dirty = git_state(Path(__file__))
    cuda = nccl = None
    gpus: list[str] = []
    if with_torch:
        import torch

        if torch.cuda.is_available():
            cuda = torch.version.cuda
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
            gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(noted_variables()) and not name.endswith(_PLACES)
    }
    return Environment(
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_name(),
        num_cpus=num_cpus(),
        gpus=gpus,
        cuda=cuda,
        nccl=nccl,
        packages=_versions([*_PACKAGES, *(package for row in BACKENDS.values() for package in row.packages)]),
        variables=variables,
        allocator=allocator_in_force(),
        boot_id=boot_id(),
        network=os.environ.get(NETWORK_VARIABLE) or None,
    )


def versions_in_use(backend: str) -> dict[str, str]:
    """Returns the versions of Python, without its last number, and of the packages that a run with a backend uses."""
    packages = _versions([*_PACKAGES, *find_backend(backend).packages])
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **packages}


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def find_allocator(libraries: str) -> str | None:
    """Returns the memory allocator that one of these libraries has in place of that of the C library; None if none has.

    Args:
        libraries: The name of a library, its path, or what proc_pid_maps(5) says.
    """
    found = _ALLOCATORS.search(libraries)
    return found[1] if found else None


def allocator_in_force() -> str | None:
    """Returns the memory allocator that this process has loaded; None where that cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return find_allocator(maps) or "glibc"


def noted_variables() -> tuple[str, ...]:
    """Returns how the names of the variables begin that a record notes, whatever the backend."""
    return (*VARIABLES, *(name for row in BACKENDS.values() for name in row.variables))


def boot_id() -> str | None:
    """Returns what tells this start of this machine from all others, from random(4); None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def git_state(file: Path) -> tuple[str | None, bool | None]:
    """Returns the commit that a file of Lockstep's is of, and whether anything was changed since; None if not known."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # Lockstep may be installed inside a repository of somebody else's, which does not have this file.
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        # In an image, which has no repository, the commit it was built from.
        return os.environ.get("LOCKSTEP_REVISION") or None, None


def num_ranks_here(num_processes: int, num_nodes: int) -> int:
    """Returns how many ranks of a job share this machine: nodes in network namespaces do, others do not."""
    return num_processes if NETWORK_VARIABLE in os.environ else num_processes // num_nodes


@functools.cache
def num_cpus() -> int:
    """Returns the number of CPU cores that this process may use, before it binds itself to fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
