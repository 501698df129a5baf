"""Starting the product's own commands and rank groups from tests."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import psutil
import pytest

from backends.registry import BACKENDS, find_backend
from launch.starters.interface import PROJECT_DIRECTORY
from records.config import RunConfig
from tests.forked.client import SESSION_VARIABLE, ForkedJob
from watch.rank_files import started_ranks

_ON_CPU = {
    name: row.capabilities
    for name, row in BACKENDS.items()
    if row.capabilities.max_world_size is None and "cpu" in row.capabilities.precisions
}
# Every backend of ours that can run several ranks on a CPU, in float64, as most trainings of these tests do.
DISTRIBUTED = [name for name, capabilities in _ON_CPU.items() if capabilities.float64]
# The others, which tests of their own train in float32.
IN_FLOAT32 = [name for name in _ON_CPU if name not in DISTRIBUTED]

# Those under which each rank computes whole tensors: on two ranks, all of them compute the same bits.
WHOLE = [name for name in DISTRIBUTED if not BACKENDS[name].capabilities.shards_weights]
_BY_STARTER = {BACKENDS[name].capabilities.start_methods[0]: name for name in reversed(DISTRIBUTED)}
# One for each starter that is some backend's default: the others are started in the same ways.
OF_EACH_STARTER = [name for name in DISTRIBUTED if name in _BY_STARTER.values()]

# Where the examples of the documentation can be imported, too.
EXAMPLES = {"PYTHONPATH": f"{PROJECT_DIRECTORY}:{PROJECT_DIRECTORY / 'docs' / 'examples'}"}

# Variables that Python and the libraries read once, when they are loaded.
_FOR_NEW_PROCESSES = ("PYTHON", "OMP_", "MKL_", "ATEN_", "ONEDNN_", "LD_", "TORCH_", "HF_", "TMPDIR")

LOCKSTEP = Path(sys.executable).with_name("lockstep")

_Found = TypeVar("_Found")
_Job = TypeVar("_Job", subprocess.Popen[str], subprocess.Popen[bytes], ForkedJob)


def require(name: str, reason: str | None) -> None:
    """Skips if there is a reason to; if LOCKSTEP_REQUIRE lists this name, the test fails instead."""
    if reason is not None:
        if name in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
            pytest.fail(f"{name} is required here: {reason}")
        pytest.skip(f"{name}: {reason}")


def require_backend(name: str) -> None:
    """Skips where a backend cannot run, unless LOCKSTEP_REQUIRE lists it."""
    require(name, find_backend(name).unavailable_reason())


def require_module(name: str) -> ModuleType:
    """Returns a module; skips where its package is not installed, unless LOCKSTEP_REQUIRE lists that package."""
    package = name.partition(".")[0]
    require(package, "it is not installed" if importlib.util.find_spec(package) is None else None)
    return importlib.import_module(name)


def skip_or_fail(reason: str | None, variable: str) -> None:
    """Skips if there is a reason to; if this variable of the environment is set, the test fails instead."""
    if reason is not None:
        if os.environ.get(variable):
            pytest.fail(reason)
        pytest.skip(reason)


def require_start_method(name: str) -> None:
    """Skips where mpirun cannot start Horovod's ranks, unless LOCKSTEP_REQUIRE lists it."""
    if name == "mpirun":
        lacks = shutil.which(name) is None or not horovod_has_mpi()
        require(name, "there is no mpirun, or Horovod was built without MPI" if lacks else None)


@functools.cache
def horovod_has_mpi() -> bool:
    """Whether Horovod was built with MPI, which a process of its own finds out: Horovod stays out of this one."""
    built = [sys.executable, "-c", "import sys, horovod.torch; sys.exit(not horovod.torch.mpi_built())"]
    return subprocess.run(built, check=False).returncode == 0


# Tests that make network namespaces; the fixture is in conftest.py.
needs_namespaces = pytest.mark.usefixtures("namespaces")

# How the present test has things started: see `starting`.
_WAYS = ["forked"]


@contextmanager
def starting(way: str) -> Iterator[None]:
    """Decides how the command line and its ranks are started inside.

    Args:
        way: "forked": both are forks of a process that has loaded all libraries, without any launcher.
            "launchers": so is each library's own launcher, which then starts the ranks.
            "processes": all are new processes, as for a user.
    """
    _WAYS.append(way)
    try:
        yield
    finally:
        _WAYS.pop()


def lockstep(
    *arguments: str | Path, timeout: float = 600, env: Mapping[str, str] = MappingProxyType({}), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end, with the tests importable, as a user's own adapter would be.

    In a test session the command and its ranks are forked from a process that has loaded all libraries, unless
    the test has the marker "launchers" or "processes", or `env` has variables that only new processes heed;
    `EXAMPLES` has none.
    """
    job = start_lockstep(*arguments, env=env, cwd=cwd)
    try:
        output, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors)


def start_lockstep(
    *arguments: str | Path, env: Mapping[str, str] = MappingProxyType({}), cwd: Path | None = None
) -> subprocess.Popen[str] | ForkedJob:
    """Starts the command line in the same way and does not wait."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY), **env}
    words = [str(argument) for argument in arguments]
    heeded = {name for name, value in env.items() if EXAMPLES.get(name) != value}
    needs_new_processes = _WAYS[-1] == "processes" or any(name.startswith(_FOR_NEW_PROCESSES) for name in heeded)
    if SESSION_VARIABLE in os.environ and not needs_new_processes:
        return ForkedJob(words, environment=environment, directory=cwd, forked_ranks=_WAYS[-1] == "forked")
    command, pipe = [str(LOCKSTEP), *words], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=cwd)


def in_a_network_of_its_own(*command: str) -> list[str]:
    """Lets a command see no traffic but its own; only root can."""
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def train(backend: str, output_dir: Path, *arguments: str | Path) -> dict[str, Any]:
    """Runs a training that must succeed and returns its record."""
    done = lockstep(backend, "--output-dir", output_dir, *arguments)
    assert done.returncode == 0, done.stderr + _logs(output_dir)
    record: dict[str, Any] = json.loads((output_dir / "record.json").read_text())
    return record


def processes_of(directory: Path) -> list[psutil.Process]:
    """All processes with this run directory on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(directory) in (process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def processes_with(mark: str | Path) -> dict[int, str]:
    """The command lines, by number, of all processes with this on them or in the environment that they began with."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (directory / "cmdline").read_bytes()
            if str(mark).encode() in line + (directory / "environ").read_bytes():
                found[int(directory.name)] = line.replace(b"\0", b" ").decode()
    return found


@contextmanager
def ending_processes_with(mark: str | Path) -> Iterator[None]:
    """Kills at the end whatever still has this on its command line or in its environment."""
    try:
        yield
    finally:
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ending(job: _Job) -> Iterator[_Job]:
    """Kills a job that a test has not waited for, since it failed; the job's guardian then ends its ranks."""
    try:
        yield job
    finally:
        if job.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
            job.wait(timeout=180)


def wait_until(
    find: Callable[[], _Found | None], what: str, *, job: subprocess.Popen[Any] | None = None, seconds: float = 180
) -> _Found:
    """Returns what is found once it is there; fails when the time is up, or the job has ended without it."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert job is None or job.poll() is None, f"{what}: the job has ended with {job and job.returncode}"
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return found


def trains(run: Path) -> bool:
    """Whether a rank of a run that was started has taken a few steps."""
    positions = [rank.position() for rank in started_ranks(run)] if (run / "logs").exists() else []
    return any(position is not None and position.step > 2 for position in positions)


# Whatever seed a training in this process has set: other workers set the same.
_DICE = random.SystemRandom()


def free_port() -> str:
    """A port that is free now, as an option has it: none of those that the kernel gives to whoever asks for any."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", _DICE.randrange(20_000, 32_000)))
            return str(probe.getsockname()[1])


def wait_for_steps(run: Path, *, job: subprocess.Popen[Any] | None = None, seconds: float = 180) -> None:
    """Returns once a run that was started has reported a step."""
    news = run / "progress.jsonl"
    wait_until(lambda: news.exists() and news.stat().st_size, "a step of the run", job=job, seconds=seconds)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of this size; skips where that cannot be done, unless LOCKSTEP_REQUIRE lists mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place]
    mounted = subprocess.run(command, capture_output=True, text=True)
    require("mount", f"a small disk cannot be had: {mounted.stderr.strip()}" if mounted.returncode else None)
    try:
        yield place
    finally:
        # Lazily: a job that a failing test leaves for a moment would keep it busy, and that error would hide the first.
        subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def lasting_directory() -> Iterator[Path]:
    """A directory that does not lie in memory, as that for temporary files may."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def fill(disk: Path) -> None:
    """Leaves no byte of a small disk."""
    with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))


def run_config(backend: str, world_size: int, output_dir: Path, **options: Any) -> RunConfig:
    """A resolved configuration of the float64 task with plain SGD."""
    settled: dict[str, Any] = {
        "backend": backend,
        "task": "token-tagging",
        "task_settings": {},
        "num_processes": world_size,
        "device": "cpu",
        "start_method": find_backend(backend).capabilities.start_methods[0],
        "threads_per_rank": 1,
        "learning_rate": 0.5,
        "optimizer": "sgd",
        "lr_scheduler": "constant",
        "warmup_ratio": 0.0,
        "max_grad_norm": 0.0,
        "num_train_epochs": 2,
        "timeout": 60,
        "output_dir": output_dir,
        "launch_command": "",
        "started_at": time.time(),
    }
    return RunConfig.model_validate(settled | options)


def _logs(directory: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(directory.glob("logs/*.log")))
