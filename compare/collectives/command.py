"""``launch/run.sh allreduce``: times the collectives of each library over sizes and numbers of ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from backends.capabilities import BackendSettings
from backends.devices import count_gpus
from backends.registry import BackendRow
from compare.collectives.cluster import Cluster, add_engine_options, cluster_of, parse
from compare.collectives.job import MeasuringJob, ranks_of
from compare.collectives.measurement import ELEMENT_BYTES, CollectivesFile, Measurement, pooled
from compare.collectives.options import CollectivesOptions, parse_sizes
from compare.collectives.selection import add_own_options, measured_backends, say_what_is_left_out
from compare.collectives.table import show
from compare.numbers import format_size
from compare.results import CollectiveSeries
from launch.arguments import Parser, command_line
from launch.display import console
from launch.errors import UsageError
from launch.nodes import ALONE, Nodes
from launch.options import add_options, own_options, settings_in, validated
from launch.scheduling import default_scheduling
from launch.signals import Interrupted, signals_raised
from launch.starters.registry import find_starter, settle_starter
from records.environment import num_cpus
from records.files import write_atomically
from records.record import Environment


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0, or 1 if ranks failed, or 128 plus the number of the signal that ended it.

    Raises:
        UsageError, UnsupportedError: What the user asks for cannot be measured.
    """
    parser = Parser(
        "allreduce",
        argument_default=argparse.SUPPRESS,
        description="Times the collectives of each library, and prints time, algbw and busbw as nccl-tests defines "
        "them, with a latency and a bandwidth fitted through the sizes.",
        epilog="Backends that communicate as another one does are measured only if you name them. One that is named "
        "alone may have options of its own (--backends horovod --wait sleep). A size counts the float32 values in the "
        "buffer of one rank or, for all_gather and gather, in the whole result.",
    )
    add_options(parser, {"collectives": CollectivesOptions})
    settings = add_engine_options(parser, arguments)
    own_settings = add_own_options(parser, arguments)
    asked = parse(parser, arguments, settings)
    options: CollectivesOptions = validated(CollectivesOptions, asked)
    own = None if own_settings is None else validated(own_settings, _own(own_settings, asked))
    cluster = cluster_of(options.engine, options.num_nodes, settings, asked)
    target = _target(options.output)
    measurements = _plan(options, own, cluster)
    terminal = console()
    if options.backends is None:
        say_what_is_left_out(terminal)
    with contextlib.ExitStack() as cleanup:
        directory = _directory(target, cluster)
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            with signals_raised():
                found = _measure(measurements, options.starts, cluster, directory, terminal)
        except Interrupted as interruption:
            print(f"lockstep: interrupted by {interruption}; all ranks have been ended", file=sys.stderr)
            return 128 + interruption.signal_number
        except _RanksFailed as failure:
            print(f"lockstep: {failure}", file=sys.stderr)
            cleanup.pop_all()  # their logs are there
            return 1
    if not found.series:
        operations = ",".join(options.operations)
        raise UsageError(f"--operations {operations}: none of the chosen backends implements these; choose all_reduce")
    assert found.environment is not None, "rank 0 describes its environment before it measures"
    show(found.series, terminal)
    content = CollectivesFile(
        kind="collectives",
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command_line(["allreduce", *arguments], without="--output"),
        environment=found.environment,
        network=None if cluster is None else cluster.network,
        series=found.series,
    )
    _write(content, target)
    terminal.print(f"results in {target}")
    return 0


def _own(settings: type[BackendSettings], asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the backend; other fields of its settings may have the names of other options."""
    return {name: value for name, value in asked.items() if name in settings.of_collectives}


class _RanksFailed(Exception):
    """Ranks failed; the text says which, why, and where there is more."""


class _Found(NamedTuple):
    """What was measured, and the environment of rank 0; None if nothing was measured."""

    series: list[CollectiveSeries]
    environment: Environment | None


def _measure(
    measurements: list[Measurement], num_starts: int, cluster: Cluster | None, directory: Path, terminal: Console
) -> _Found:
    """Makes all measurements, one after the other, and then all of them again, so that starts are far apart.

    Raises:
        _RanksFailed: Ranks failed.
    """
    starts: list[list[CollectiveSeries]] = []
    environment: Environment | None = None
    for start in range(1, num_starts + 1):
        starts.append([])
        for number, measurement in enumerate(measurements):
            which = f", start {start} of {num_starts}" if num_starts > 1 else ""
            job = MeasuringJob(measurement, directory / f"{start}-{number}", terminal, cluster, which)
            failure = job.run()
            if failure is not None:
                raise _RanksFailed(f"{measurement.name} with {measurement.num_processes} ranks failed: {failure}")
            if start == 1:
                for operation in job.left_out:
                    terminal.print(f"{measurement.name} has no {operation}: left out")
            starts[-1] += job.series
            environment = environment or job.environment
    return _Found(pooled(starts), environment)


def _directory(target: Path, cluster: Cluster | None) -> Path:
    """Creates the directory of what ranks read and write; other machines see one beside the results."""
    prefix = "lockstep-allreduce-"
    if cluster is None or not cluster.is_elsewhere:
        return Path(tempfile.mkdtemp(prefix=prefix))
    parent = target.absolute().parent
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _plan(options: CollectivesOptions, own: BackendSettings | None, cluster: Cluster | None) -> list[Measurement]:
    """Settles what each group of ranks measures; the groups are in the order in which they run."""
    if options.device == "cuda" and cluster is None and count_gpus() == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu or check the driver")
    world_sizes = options.num_processes or [max(2, count_gpus()) if cluster is None else cluster.num_processes]
    if world_sizes == [1]:
        where = "" if cluster is None else f"--engine {cluster.engine}: "
        raise UsageError(f"{where}these options ask for a single rank, which has no other; ask for two or more")
    sizes = parse_sizes(options.sizes)
    least = world_sizes[-1] * ELEMENT_BYTES
    if sizes[0] < least:
        raise UsageError(
            f"--sizes {options.sizes}: {format_size(sizes[0])} is less than one float32 value for each of "
            f"{world_sizes[-1]} ranks; choose {least} bytes or more"
        )
    shared: dict[str, Any] = {
        "operations": options.operations,
        "sizes": sizes,
        "timeout": options.timeout,
        "seconds_per_point": options.seconds_per_point,
    }
    rows = measured_backends(options.backends)
    if own is not None:
        (name,) = rows
        shared["own_options"] = own_options(name, own.model_dump(mode="json"))
    measurements = [
        _settle(backend, row, num_processes, options, cluster, shared)
        for num_processes in world_sizes
        for backend, row in rows.items()
    ]
    if cluster is not None:
        cluster.check(measurements)
    return measurements


def _settle(
    backend: str,
    row: BackendRow,
    num_processes: int,
    options: CollectivesOptions,
    cluster: Cluster | None,
    shared: dict[str, Any],
) -> Measurement:
    """Settles what the user leaves open for one backend and number of ranks, and refuses what the backend cannot do."""
    capabilities = row.capabilities
    device, start_method = options.device, options.start_method
    num_gpus = count_gpus() if cluster is None else cluster.num_gpus
    if device == "auto":
        device = "cuda" if num_gpus and "cuda" in capabilities.precisions else "cpu"
    capabilities.check(name=backend, device=device, precision="fp32", world_size=num_processes)
    if device == "cuda" and cluster is None and num_processes > num_gpus and not capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {num_processes}: {backend} needs a GPU for each rank, but this machine has {num_gpus}"
        )
    if cluster is not None and not any(find_starter(name).spans_nodes for name in capabilities.start_methods):
        raise UsageError(
            f"--engine {options.engine}: {backend} cannot run on several nodes; leave it out of --backends"
        )
    nodes = ALONE if cluster is None else Nodes(cluster.nodes_of(num_processes))
    starter = settle_starter(backend, capabilities.start_methods, start_method, device=device, nodes=nodes)
    is_elsewhere = cluster is not None and cluster.is_elsewhere
    num_ranks_here = num_processes // nodes.num_nodes if is_elsewhere else num_processes
    scheduling = default_scheduling(
        settings_in(row.settings, shared.get("own_options", [])),
        device=device,
        start_method=starter.name,
        num_ranks_here=num_ranks_here,
    )
    measurement = Measurement(
        backend=backend,
        scheduling=scheduling,
        start_method=starter.name,
        device=device,
        num_processes=num_processes,
        threads_per_rank=options.threads_per_rank or (1 if is_elsewhere else max(1, num_cpus() // num_processes)),
        **shared,
    )
    if cluster is None:  # on nodes, the command of each one checks this
        starter.check(ranks_of(measurement, Path()))
    return measurement


def _target(path: Path | None) -> Path:
    """Settles where results go; only the directory of the default need not exist yet."""
    target = path or Path("runs") / f"collectives-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    directory = target.absolute().parent
    try:
        if target.exists():
            raise UsageError(f"--output {target}: exists already; remove it or choose another file")
        if path is None and not directory.exists():
            directory = directory.parent
        if not directory.is_dir():
            raise UsageError(f"--output {target}: there is no directory {target.parent}; create it first")
    except OSError as error:  # the system refuses the very name
        raise UsageError(f"--output {target}: {error.strerror}; choose another file") from error
    if not os.access(directory, os.W_OK):
        raise UsageError(f"--output {target}: {directory} is not writable; choose another directory")
    return target


def _write(content: CollectivesFile, target: Path) -> None:
    if target.exists():
        raise UsageError(f"--output {target}: another command has just written it; choose another file")
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, content.model_dump_json(indent=1) + "\n")
