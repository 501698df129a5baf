"""Settling what the user left open, and refusing what cannot work, before anything is created."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from backends.devices import count_gpus
from backends.interface import UnsupportedError
from backends.registry import BackendRow
from launch.config import (
    DEFAULT_CPU_PROCESSES,
    RunConfig,
    RunOptions,
    UsageError,
    check_port,
    default_output_dir,
    settle_batch_sizes,
)
from launch.engines import Ranks, engine_command
from launch.options import Options
from launch.rank import CONFIG_NAME
from tasks.interface import TaskSettings


def resolve(backend: str, row: BackendRow, asked: Options, *, started_at: float) -> RunConfig:
    """Turns options into the configuration of a run that can start.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It cannot; the text says why and what to do.
    """
    options, backend_settings, task_class, settings = asked
    reason = row.unavailable_reason()
    if reason is not None:
        raise UnsupportedError(f"{backend} cannot run here: {reason}")
    device = _settle_device(options, row)
    num_processes = options.num_processes or _default_num_processes(options, row, device)
    row.capabilities.check(
        name=backend,
        device=device,
        precision=options.precision,
        world_size=num_processes,
        find_unused_parameters=options.find_unused_parameters,
    )
    if options.torch_compile:
        check_compiler(backend, row, device)
    start_methods = row.capabilities.start_methods
    start_method = start_methods[0] if options.start_method is None else options.start_method
    if start_method not in start_methods:
        raise UsageError(f"--start-method {start_method}: {backend} is started by {' or '.join(start_methods)}")
    if device == "cuda" and num_processes > count_gpus() and not row.capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {num_processes}: {backend} needs a GPU for each rank, here are {count_gpus()}"
        )
    # Composed for its checks alone: they belong before the long preparation of data.
    engine_command(start_method, Ranks(num_processes, (), device, 1, options.master_port, options.timeout, Path()))
    micro_batch_size = settle_batch_sizes(options.global_batch_size, options.micro_batch_size, num_processes)
    output_dir = _settle_output_dir(options, backend, settings)
    if options.master_port is not None:
        check_port(options.master_port)

    task = task_class(settings)
    task.prepare()
    if num_processes > task.num_samples("train"):
        raise UsageError(
            f"--num-processes {num_processes}: there are only {task.num_samples('train')} training samples; "
            "use at most as many ranks"
        )
    settled = {
        "backend": backend,
        "backend_settings": backend_settings.model_dump(mode="json"),
        "task_settings": settings.model_dump(mode="json"),
        "num_processes": num_processes,
        "device": device,
        "start_method": start_method,
        "threads_per_rank": options.threads_per_rank or max(1, _num_cpus() // num_processes),
        "micro_batch_size": micro_batch_size,
        "learning_rate": options.learning_rate or task.default_learning_rate,
        "output_dir": output_dir,
        "launch_command": shlex.join(["launch/run.sh", *sys.argv[1:]]),
        "started_at": started_at,
    }
    return RunConfig.model_validate(options.model_dump() | settled)


def check_compiler(backend: str, row: BackendRow, device: str) -> None:
    """Raises UsageError where a compiled model cannot be trained."""
    if not row.capabilities.compiled_models:
        raise UsageError(f"--torch-compile: {backend} cannot train a compiled model; drop it or choose another backend")
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        raise UsageError("--torch-compile: needs a C++ compiler on CPU; install one (Debian: apt-get install g++)")
    if device == "cuda" and find_spec("triton") is None:
        raise UsageError("--torch-compile: needs triton on GPUs; pip install triton, or drop it")


def _settle_device(options: RunOptions, row: BackendRow) -> Literal["cpu", "cuda"]:
    if options.device == "auto":
        return "cuda" if count_gpus() and "cuda" in row.capabilities.precisions else "cpu"
    if options.device == "cuda" and count_gpus() == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu or check the driver")
    return options.device


def _default_num_processes(options: RunOptions, row: BackendRow, device: str) -> int:
    """One rank per GPU, or as many of them as can share the global batch evenly."""
    if row.capabilities.max_world_size is not None:
        return row.capabilities.max_world_size
    if device == "cpu":
        return DEFAULT_CPU_PROCESSES
    return max(number for number in range(1, count_gpus() + 1) if options.global_batch_size % number == 0)


def _settle_output_dir(options: RunOptions, backend: str, settings: TaskSettings) -> Path:
    chosen = options.output_dir or default_output_dir(backend)
    directory = chosen.absolute()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output-dir {chosen}: this is a file; name a directory")
    if directory.exists() and any(directory.iterdir()):
        if not _holds_run(directory):
            raise UsageError(f"--output-dir {chosen}: not empty, and what it holds is no run; choose another directory")
        if not options.overwrite:
            raise UsageError(f"--output-dir {chosen}: holds a run already; add --overwrite or choose another directory")
        _check_inputs_survive(directory, settings)
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    if not parent.is_dir():
        raise UsageError(f"--output-dir {chosen}: {parent} is a file; choose another directory")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--output-dir {chosen}: {parent} is not writable; choose another directory")
    return directory


def _holds_run(directory: Path) -> bool:
    """Whether a run of ours wrote this directory; others, too, call a file run.json."""
    try:
        RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _check_inputs_survive(directory: Path, settings: TaskSettings) -> None:
    """Refuses to replace a run whose directory holds what the new run is to read."""
    for name, value in settings:
        if isinstance(value, (str, Path)):
            path = Path(value).resolve()
            if path.exists() and path.is_relative_to(directory.resolve()):
                raise UsageError(
                    f"--overwrite would remove --{name.replace('_', '-')} {value} with the run in {directory}; "
                    "choose another --output-dir"
                )


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
