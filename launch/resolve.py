"""Settles what the user left open and refuses what cannot work, before anything is created."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from backends.capabilities import BackendSettings, UnsupportedError
from backends.devices import count_gpus
from backends.registry import BackendRow
from launch.allocator import ALLOCATOR_OF_C, Allocator, settle_allocator
from launch.arguments import command_line
from launch.batching import settle_batching
from launch.errors import UsageError, one_line
from launch.here import of_this_machine
from launch.job import Job, compose_job
from launch.nodes import Nodes, check_nodes, check_port, settle_nodes
from launch.options import Options
from launch.run_directory import settle_output_dir
from launch.scheduling import default_scheduling
from launch.starters.interface import Ranks, Starter
from launch.world import check_world
from records.config import DEFAULT_CPU_PROCESSES, MOST_ON_A_NODE, Batching, RunConfig, RunOptions
from records.environment import num_cpus, num_ranks_here
from records.names import LOGS_NAME
from tasks.interface import Task

# What each rank of a run is.
RANK_PROGRAM = ("training.rank",)


class Resolved(NamedTuple):
    """A run that can start: its configuration, its task, prepared, and the job that starts its ranks."""

    config: RunConfig
    task: Task
    job: Job


class Settled(NamedTuple):
    """A run that some machine can start; `job` is None if this one cannot."""

    config: RunConfig
    task: Task
    job: Job | None


class _World(NamedTuple):
    """Where a run computes, in how many ranks, and what starts them."""

    device: Literal["cpu", "cuda"]
    nodes: Nodes
    num_processes: int
    starter: Starter

    @property
    def num_local_processes(self) -> int:
        return self.num_processes // self.nodes.num_nodes


def resolve(
    backend: str, row: BackendRow, asked: Options, *, started_at: float, rank_program: tuple[str, ...] = RANK_PROGRAM
) -> Resolved:
    """Turns options into a run that can start.

    Args:
        backend: The backend.
        row: Its row in the registry.
        asked: The options.
        started_at: When the user's command began, in seconds since 1970.
        rank_program: The module that each rank runs, and its first arguments; the run's directory follows them.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It cannot; the text says why and what to do.
    """
    if asked.is_dry_run:
        raise UsageError("--dry-run: this command has none; leave it out, or use launch/run.sh BACKEND --dry-run")
    config, task, job = settle(backend, row, asked, started_at=started_at, rank_program=rank_program)
    assert job is not None, "without a list to note refusals in, they are raised"
    return Resolved(config, task, job)


def settle(
    backend: str,
    row: BackendRow,
    asked: Options,
    *,
    started_at: float,
    rank_program: tuple[str, ...] = RANK_PROGRAM,
    noted: list[str] | None = None,
) -> Settled:
    """Does the work of `resolve`, for a machine that may not be this one.

    Args:
        backend: As in `resolve`.
        row: As in `resolve`.
        asked: As in `resolve`.
        started_at: As in `resolve`.
        rank_program: As in `resolve`.
        noted: Where to note what only this machine refuses, and a default batch that does not fit; None to raise it.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It cannot start on any machine, or not here.
    """
    options, backend_settings, task_class, settings, start, _, _ = asked
    world = _settle_world(backend, row, options, noted)
    options = _with_whole_batches(options, world.num_processes, noted)
    _check_early(backend, row, options, task_class)
    with of_this_machine(noted):
        _check_programs(options, backend_settings, world)
    micro_batch_size = settle_batch_sizes(options.global_batch_size, options.micro_batch_size, world.num_processes)
    allocator = ALLOCATOR_OF_C
    with of_this_machine(noted):
        allocator = settle_allocator(options.allocator)
    output_dir = settle_output_dir(options, backend, task_class, settings, start)
    ranks = _ranks(world, options, (*rank_program, str(output_dir)), output_dir, allocator)
    job = None
    with of_this_machine(noted):
        job = _compose_here(world, ranks, options, output_dir, row)

    task = task_class(settings)
    task.prepare()
    _check_task(task, options, world.num_processes)
    settled = {
        "backend": backend,
        "backend_settings": backend_settings.model_dump(mode="json"),
        "task_settings": settings.model_dump(mode="json"),
        "num_processes": world.num_processes,
        "device": world.device,
        "start_method": world.starter.name,
        "threads_per_rank": ranks.num_threads,
        "allocator": allocator.option,
        "scheduling": options.scheduling or _scheduling_of(world, backend_settings),
        "micro_batch_size": micro_batch_size,
        "batching": settle_batching(options, task, cuts_batches=row.capabilities.cuts_batches),
        "learning_rate": options.learning_rate or task.default_learning_rate,
        "output_dir": output_dir,
        "launch_command": command_line(sys.argv[1:], without="--output-dir"),
        "started_at": started_at,
        "resume_from": start.path if start else None,
    }
    return Settled(RunConfig.model_validate(options.model_dump() | settled), task, job)


def _with_whole_batches(options: RunOptions, num_processes: int, noted: list[str] | None) -> RunOptions:
    """Gives each rank one micro-batch where the default global batch cannot be divided among so many, and notes it."""
    if noted is None or "global_batch_size" in options.model_fields_set:
        return options
    try:
        settle_batch_sizes(options.global_batch_size, options.micro_batch_size, num_processes)
    except UsageError as error:
        each = options.micro_batch_size or 1
        size = each * num_processes
        noted.append(f"{one_line(error)} (shown for {size}, {each} sample{'' if each == 1 else 's'} for each rank)")
        return options.model_copy(update={"global_batch_size": size})
    return options


def _scheduling_of(world: _World, settings: BackendSettings) -> Literal["batch", "normal"]:
    here = num_ranks_here(world.num_processes, world.nodes.num_nodes)
    return default_scheduling(settings, device=world.device, start_method=world.starter.name, num_ranks_here=here)


def _ranks(
    world: _World, options: RunOptions, module: tuple[str, ...], output_dir: Path, allocator: Allocator
) -> Ranks:
    return Ranks(
        num_processes=world.num_processes,
        module=module,
        device=world.device,
        num_threads=options.threads_per_rank or max(1, num_cpus() // world.num_local_processes),
        master_port=options.master_port,
        timeout_seconds=options.timeout,
        log_directory=output_dir / LOGS_NAME,
        nodes=world.nodes,
        preload=allocator.library,
        max_restarts=options.max_restarts,
    )


def _compose_here(world: _World, ranks: Ranks, options: RunOptions, output_dir: Path, row: BackendRow) -> Job:
    """Composes the job of this machine, which must have the cores, the programs and the port for it."""
    if world.num_local_processes > MOST_ON_A_NODE:
        raise UsageError(
            f"--num-processes {world.num_processes}: a node starts at most {MOST_ON_A_NODE} ranks, and this one would "
            f"start {world.num_local_processes}; use fewer ranks, or more --num-nodes"
        )
    _check_cores(options, world.num_local_processes, ranks.num_threads)
    waits_in_forward = row.capabilities.waits_in_forward(sync_batchnorm=options.sync_batchnorm)
    job = replace(compose_job(world.starter, ranks, output_dir, row.signs), waits_in_forward=waits_in_forward)
    # A dry run may lack the address at which nodes meet, and then nobody listens here.
    meets = options.master_addr is not None if world.nodes.num_nodes > 1 else options.master_port is not None
    if world.nodes.node_rank == 0 and meets:
        check_port(ranks.port, world.nodes.master_addr)
    return job


def _check_early(backend: str, row: BackendRow, options: RunOptions, task: type[Task]) -> None:
    """Checks what needs no data."""
    if options.torch_compile:
        check_compilable(backend, row)
    if options.sync_batchnorm:
        _check_sync_batchnorm(backend, row, options.batching, task)
    _check_metric(options.metric_for_best_model, task.metric_names)


def _check_programs(options: RunOptions, settings: BackendSettings, world: _World) -> None:
    """Checks that this machine has what some options need."""
    if options.torch_compile:
        check_compiler(world.device)
    _check_tracker(options.tracker)
    settings.check_machine(start_method=world.starter.name)


def _check_sync_batchnorm(backend: str, row: BackendRow, batching: Batching | None, task: type[Task]) -> None:
    if not row.capabilities.sync_batchnorm:
        raise UsageError(
            f"--sync-batchnorm: {backend} does not support it; leave the option out, or choose another backend"
        )
    if not task.has_batch_norm:
        raise UsageError(
            f"--sync-batchnorm: the task {task.name} has a model without BatchNorm; leave the option out, or set "
            "has_batch_norm in the class of a task of your own"
        )
    if batching not in (None, "padded"):
        raise UsageError(
            f"--batching {batching}: each number of ranks then computes other samples together, of which "
            "--sync-batchnorm takes other statistics; use --batching padded"
        )


def _check_tracker(tracker: str) -> None:
    if tracker != "none" and find_spec(tracker) is None:
        raise UsageError(
            f"--tracker {tracker}: the package is not installed; pip install {tracker}, or leave the option out"
        )


def _settle_world(backend: str, row: BackendRow, options: RunOptions, noted: list[str] | None) -> _World:
    """Settles where to compute, in how many ranks, and what starts them."""
    with of_this_machine(noted):
        reason = row.unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"{backend} cannot run here: {reason}")
    device = _settle_device(options, row, noted)
    check_nodes(options.num_nodes, options.node_rank, options.master_addr)
    nodes = Nodes(options.num_nodes, options.node_rank, min_nodes=options.min_nodes)
    with of_this_machine(noted):
        nodes = settle_nodes(options.num_nodes, options.node_rank, options.master_addr, options.min_nodes)
    num_processes = options.num_processes or _default_num_processes(options, row, device)
    starter = check_world(backend, row, options, device=device, num_processes=num_processes, nodes=nodes)
    world = _World(device, nodes, num_processes, starter)
    with of_this_machine(noted):
        _check_gpus(backend, row, world)
    return world


def _check_gpus(backend: str, row: BackendRow, world: _World) -> None:
    is_short_of_gpus = world.device == "cuda" and 0 < count_gpus() < world.num_local_processes
    if is_short_of_gpus and not row.capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {world.num_processes}: {backend} needs a GPU for each rank of a node, and this node has "
            f"{count_gpus()}; use fewer ranks"
        )


def _check_cores(options: RunOptions, num_ranks: int, num_threads: int) -> None:
    """Refuses to bind ranks to cores that are not there, and a way of scheduling that this system does not have."""
    if options.scheduling == "batch" and not hasattr(os, "SCHED_BATCH"):
        raise UsageError("--scheduling batch: this system has no such policy; leave the option out")
    if not options.bind_ranks:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--bind-ranks: this system cannot bind a process to cores; leave the option out")
    if num_ranks * num_threads > num_cpus():
        raise UsageError(
            f"--bind-ranks: {num_ranks} ranks with {num_threads} thread(s) each need {num_ranks * num_threads} cores, "
            f"and this machine has {num_cpus()}; use fewer ranks or threads, or --no-bind-ranks"
        )


def _check_task(task: Task, options: RunOptions, num_processes: int) -> None:
    """Refuses options that do not fit the data, now that they are known."""
    num_samples = task.num_samples("train")
    if num_processes > num_samples:
        raise UsageError(
            f"--num-processes {num_processes}: there are only {num_samples} training samples; use at most as many ranks"
        )
    # The default may be larger than a small dataset; each epoch is one step then.
    is_default = options.global_batch_size == RunOptions.model_fields["global_batch_size"].default
    if not is_default and options.global_batch_size > num_samples:
        raise UsageError(
            f"--global-batch-size {options.global_batch_size}: there are only {num_samples} training samples; "
            "choose at most as many"
        )
    _check_metric(options.metric_for_best_model, task.metric_names)


def _check_metric(name: str | None, computed: tuple[str, ...]) -> None:
    if name is not None and computed and name not in computed:
        raise UsageError(f"--metric-for-best-model {name}: the task computes {', '.join(computed)}; choose one")


def check_compilable(backend: str, row: BackendRow) -> None:
    """Raises UsageError where a backend cannot train a compiled model."""
    if not row.capabilities.compiled_models:
        raise UsageError(
            f"--torch-compile: {backend} cannot train a compiled model; leave the option out, or choose another backend"
        )


def check_compiler(device: str) -> None:
    """Raises UsageError where this machine cannot compile a model."""
    # The ones that Inductor and Triton will call.
    variable, default = ("CXX", "g++") if device == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable) or default
    if shutil.which(compiler) is None:
        raise UsageError(
            f"--torch-compile needs the compiler {compiler}, which is not installed; install it, or set {variable} to "
            "another"
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"  # which the code that they compile includes
    if not headers.exists():
        raise UsageError(
            f"--torch-compile needs {headers}, which is not installed; install the headers of Python (Debian: "
            "python3-dev), or leave the option out"
        )
    if device == "cuda" and find_spec("triton") is None:
        raise UsageError("--torch-compile needs triton on GPUs; pip install triton, or leave the option out")


def _settle_device(options: RunOptions, row: BackendRow, noted: list[str] | None) -> Literal["cpu", "cuda"]:
    if options.device == "auto":
        if noted is not None and "cpu" not in row.capabilities.precisions:
            return "cuda"  # of the machine that the run is for
        return "cuda" if count_gpus() and "cuda" in row.capabilities.precisions else "cpu"
    with of_this_machine(noted):
        if options.device == "cuda" and count_gpus() == 0:
            raise UsageError("--device cuda: no GPU is visible here; use --device cpu, or check the driver")
    return options.device


def _default_num_processes(options: RunOptions, row: BackendRow, device: str) -> int:
    """One rank per GPU, or as many of them as can share the global batch evenly; equally many on each node."""
    if row.capabilities.max_world_size is not None:
        return row.capabilities.max_world_size
    if device == "cpu":
        return max(DEFAULT_CPU_PROCESSES, options.num_nodes)
    numbers = [options.num_nodes * local for local in range(1, count_gpus() + 1)]
    return max((number for number in numbers if options.global_batch_size % number == 0), default=options.num_nodes)


def settle_batch_sizes(global_batch_size: int, micro_batch_size: int | None, num_processes: int) -> int:
    """Returns the micro-batch size, checking that a global batch is a whole number of rounds.

    Raises:
        UsageError: The sizes do not divide.
    """
    if global_batch_size % num_processes:
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a multiple of the {num_processes} ranks; "
            f"choose a multiple of {num_processes}, or change --num-processes"
        )
    if micro_batch_size is None:
        return global_batch_size // num_processes
    if global_batch_size % (micro_batch_size * num_processes):
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} "
            f"x {num_processes} ranks = {micro_batch_size * num_processes}; change one of the three"
        )
    return micro_batch_size
