"""``launch/run.sh allreduce``: times the collectives of each library over sizes and numbers of ranks."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from backends.devices import count_gpus
from backends.registry import BackendRow
from compare.collectives.job import MeasuringJob, ranks_of
from compare.collectives.measurement import ELEMENT_BYTES, CollectivesFile, Measurement
from compare.collectives.options import CollectivesOptions, parse_sizes
from compare.collectives.selection import measured_backends, say_what_is_left_out
from compare.collectives.table import show
from compare.numbers import format_size
from compare.results import CollectiveSeries
from launch.arguments import Parser, command_line
from launch.display import console
from launch.errors import UsageError
from launch.options import add_options, validated
from launch.signals import Interrupted, signals_raised
from launch.starters.registry import settle_starter
from records.environment import describe_environment, num_cpus
from records.files import write_atomically
from watch.failures import JobFailure


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
        epilog="Backends that communicate as another one does are measured only if you name them. A size counts the "
        "float32 values in the buffer of one rank or, for all_gather and gather, in the whole result.",
    )
    add_options(parser, {"collectives": CollectivesOptions})
    options: CollectivesOptions = validated(CollectivesOptions, vars(parser.parse_args(arguments)))
    target = _target(options.output)
    measurements = _plan(options)
    terminal = console()
    if options.backends is None:
        say_what_is_left_out(terminal)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-allreduce-"))
    series: list[CollectiveSeries] = []
    failure: JobFailure | None = None
    try:
        with signals_raised():
            for number, measurement in enumerate(measurements):
                job = MeasuringJob(measurement, directory / str(number), terminal)
                failure = job.run()
                if failure is not None:
                    break
                series += job.series
    except Interrupted as interruption:
        print(f"lockstep: interrupted by {interruption}; all ranks have been ended", file=sys.stderr)
        return 128 + interruption.signal_number
    finally:
        if failure is None:
            shutil.rmtree(directory, ignore_errors=True)
    if failure is not None:
        where = f"{measurement.backend} with {measurement.num_processes} ranks"
        print(f"lockstep: {where} failed: {failure}{failure.where_to_read_more}", file=sys.stderr)
        return 1
    if not series:
        asked = ",".join(options.operations)
        raise UsageError(f"--operations {asked}: none of the chosen backends implements these; choose all_reduce")
    show(series, terminal)
    _write(series, command_line(["allreduce", *arguments], without="--output"), target)
    terminal.print(f"results in {target}")
    return 0


def _plan(options: CollectivesOptions) -> list[Measurement]:
    """Settles what each group of ranks measures; the groups are in the order in which they run."""
    if options.device == "cuda" and count_gpus() == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu or check the driver")
    world_sizes = options.num_processes or [max(2, count_gpus())]
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
    return [
        _settle(backend, row, num_processes, options, shared)
        for num_processes in world_sizes
        for backend, row in rows.items()
    ]


def _settle(
    backend: str, row: BackendRow, num_processes: int, options: CollectivesOptions, shared: dict[str, Any]
) -> Measurement:
    """Settles what the user leaves open for one backend and number of ranks, and refuses what the backend cannot do."""
    capabilities = row.capabilities
    device, start_method = options.device, options.start_method
    if device == "auto":
        device = "cuda" if count_gpus() and "cuda" in capabilities.precisions else "cpu"
    capabilities.check(name=backend, device=device, precision="fp32", world_size=num_processes)
    if device == "cuda" and num_processes > count_gpus() and not capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {num_processes}: {backend} needs a GPU for each rank, but this machine has {count_gpus()}"
        )
    starter = settle_starter(backend, capabilities.start_methods, start_method, device=device)
    measurement = Measurement(
        backend=backend,
        start_method=starter.name,
        device=device,
        num_processes=num_processes,
        threads_per_rank=options.threads_per_rank or max(1, num_cpus() // num_processes),
        **shared,
    )
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


def _write(series: list[CollectiveSeries], command: str, target: Path) -> None:
    if target.exists():
        raise UsageError(f"--output {target}: another command has just written it; choose another file")
    content = CollectivesFile(
        kind="collectives",
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        environment=describe_environment(with_torch=True),
        series=series,
    )
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, content.model_dump_json(indent=1) + "\n")
