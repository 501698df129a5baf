"""Starting the product's own commands and rank groups from tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.registry import BACKENDS, find_backend
from launch.config import RunConfig
from launch.engines import PROJECT_DIRECTORY

# Every backend of ours that can run several ranks on a CPU.
DISTRIBUTED = [
    name
    for name, row in BACKENDS.items()
    if row.capabilities.max_world_size is None and "cpu" in row.capabilities.precisions
]

LOCKSTEP = Path(sys.executable).with_name("lockstep")


def require_backend(name: str) -> None:
    """Skips where a backend cannot run, unless LOCKSTEP_REQUIRE lists it."""
    reason = find_backend(name).unavailable_reason()
    if reason is not None:
        if name in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
            pytest.fail(f"{name} is required here: {reason}")
        pytest.skip(f"{name}: {reason}")


def require_start_method(name: str) -> None:
    """Skips where mpirun cannot start Horovod's ranks, unless LOCKSTEP_REQUIRE lists it."""
    if name != "mpirun":
        return
    built = [sys.executable, "-c", "import sys, horovod.torch; sys.exit(not horovod.torch.mpi_built())"]
    if shutil.which(name) is None or subprocess.run(built, check=False).returncode:
        if name in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
            pytest.fail("mpirun and a Horovod built with MPI are required here")
        pytest.skip("no mpirun, or a Horovod built without MPI")


def lockstep(*arguments: str | Path, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end, with the tests importable, as a user's own adapter would be."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY), **options.pop("env", {})}
    command = [str(LOCKSTEP), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)


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
        if str(directory) in (process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for_steps(run: Path) -> None:
    """Returns once a run that was started has reported a step."""
    deadline = time.monotonic() + 60
    while not (run / "progress.jsonl").exists() or not (run / "progress.jsonl").stat().st_size:
        assert time.monotonic() < deadline, "the run took no step"
        time.sleep(0.1)


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
