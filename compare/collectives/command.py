"""``launch/run.sh allreduce``: times the collectives of each library on its own path, over sizes and ranks."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.measure import Measurement as Width
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.devices import count_gpus
from backends.interface import UnsupportedError
from backends.registry import BACKENDS, BackendRow, find_backend
from compare.collectives.measurement import (
    ELEMENT_BYTES,
    MEASUREMENT_NAME,
    OPERATIONS,
    CollectivesFile,
    Measurement,
    collective_point,
    fit_line,
)
from compare.report.results import CollectivePoint, CollectiveSeries, Interval
from launch.arguments import Parser, named_path
from launch.display import console
from launch.engines.interface import Ranks
from launch.engines.registry import find_engine
from launch.errors import UsageError
from launch.job import compose_job
from launch.signals import Interrupted, signals_raised
from launch.supervisor import run_job
from records.environment import describe_environment, num_cpus
from records.files import write_atomically
from records.names import LOGS_NAME
from records.news import LibraryFound, News, PointMeasured
from records.progress import ProgressReader
from watch.failures import JobFailure

_COMMAND = "launch/run.sh allreduce"
_UNITS = {"": 1, "B": 1, "KB": 2**10, "KIB": 2**10, "MB": 2**20, "MIB": 2**20, "GB": 2**30, "GIB": 2**30}
_STEP = 4  # from one size of a range to the next
_MAX_BYTES = 4 * 2**30
_ANY_WIDTH = 1000
_MAX_PROCESSES = 64
_MAX_THREADS = 1024
_MAX_TIMEOUT = 10**6
_MAX_SECONDS_PER_POINT = 3600.0
T = TypeVar("T")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "allreduce",
        description="Times the collectives of each library on its own path, and tells time, algbw and busbw as "
        "nccl-tests defines them, with latency and bandwidth fitted through the sizes.",
        epilog="Backends that use the collectives of another one are measured only where they are named. Sizes count "
        "float32 values, of one rank's buffer or, for all_gather and gather, of the whole result.",
    )
    parser.add_argument(
        "--backends", metavar="NAME,...", help="also your own, as package.module:Class (default: each path available)"
    )
    parser.add_argument(
        "--num-processes", metavar="N,...", help="ranks; several numbers in turn (default: one per GPU, at least 2)"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        default="1KB..256MB",
        help="sizes, or ranges in steps of a factor of 4; 1KB = 1KiB = 1024 bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--operations", metavar="NAME,...", default=",".join(OPERATIONS), help="collectives (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help="where the buffers lie")
    parser.add_argument("--start-method", metavar="NAME", help="what starts the ranks (default: each backend's own)")
    parser.add_argument("--threads-per-rank", metavar="N", help="CPU threads of a rank (default: cores / ranks)")
    parser.add_argument(
        "--timeout",
        metavar="X",
        default="60",
        help="seconds after which a collective that waits is an error (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds-per-point",
        metavar="X",
        default="0.3",
        help="how long to repeat each collective at each size, 5 to 100 times (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=named_path, metavar="FILE", help="must not exist yet (default: runs/collectives-TIME.json)"
    )
    return parser


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0, or 1 if ranks failed, or 128 plus the number of the signal that ended it.

    Raises:
        UsageError, UnsupportedError: The request cannot be served.
    """
    options = _parser().parse_args(arguments)
    target = _target(options.output)
    measurements = _plan(options)
    terminal = console()
    if options.backends is None:
        _say_what_is_left_out(terminal)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-allreduce-"))
    series: list[CollectiveSeries] = []
    failure: JobFailure | None = None
    try:
        with signals_raised():
            for number, measurement in enumerate(measurements):
                job = _Job(measurement, directory / str(number), terminal)
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
        print(f"lockstep: {where} failed: {failure}\n  more in {failure.log}", file=sys.stderr)
        return 1
    if not series:
        raise UsageError(f"--operations {options.operations}: no backend asked for has them; choose all_reduce")
    show(series, terminal)
    _write(series, shlex.join([*_COMMAND.split(), *arguments]), target)
    terminal.print(f"results in {target}")
    return 0


def _plan(options: argparse.Namespace) -> list[Measurement]:
    """Settles what each group of ranks is to do; the groups in the order in which they are to run."""
    device = options.device
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and count_gpus() == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu or check the driver")
    world_sizes = [max(2, count_gpus())]
    if options.num_processes is not None:
        world_sizes = _each(options.num_processes, _world_size)
    sizes = parse_sizes(options.sizes)
    least = max(world_sizes) * ELEMENT_BYTES
    if sizes[0] < least:
        raise UsageError(
            f"--sizes {options.sizes}: {format_size(sizes[0])} is no float32 value for each of {max(world_sizes)} "
            f"ranks; choose {least} bytes or more"
        )
    shared: dict[str, Any] = {
        "operations": _each(options.operations, _operation),
        "sizes": sizes,
        "timeout": _number("--timeout", options.timeout, float, 1, _MAX_TIMEOUT),
        "seconds_per_point": _number(
            "--seconds-per-point", options.seconds_per_point, float, 0, _MAX_SECONDS_PER_POINT
        ),
    }
    rows = _rows(options.backends)
    return [
        _settle(backend, row, num_processes, options, shared)
        for num_processes in world_sizes
        for backend, row in rows.items()
    ]


def _settle(
    backend: str,
    row: BackendRow,
    num_processes: int,
    options: argparse.Namespace,
    shared: dict[str, Any],
) -> Measurement:
    """Settles what is left open for one backend in one world, refusing what it cannot do."""
    capabilities = row.capabilities
    device, start_method, threads = options.device, options.start_method, max(1, num_cpus() // num_processes)
    if options.threads_per_rank is not None:
        threads = _number("--threads-per-rank", options.threads_per_rank, int, 1, _MAX_THREADS)
    if device == "auto":
        device = "cuda" if count_gpus() and "cuda" in capabilities.precisions else "cpu"
    capabilities.check(name=backend, device=device, precision="fp32", world_size=num_processes)
    if device == "cuda" and num_processes > count_gpus() and not capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {num_processes}: {backend} needs a GPU for each rank, here are {count_gpus()}"
        )
    if start_method is not None and start_method not in capabilities.start_methods:
        raise UsageError(
            f"--start-method {start_method}: {backend} is started by {' or '.join(capabilities.start_methods)}; "
            "choose that, or name only backends that it starts"
        )
    measurement = Measurement(
        backend=backend,
        start_method=start_method or capabilities.start_methods[0],
        device=device,
        num_processes=num_processes,
        threads_per_rank=threads,
        **shared,
    )
    find_engine(measurement.start_method).check(_ranks(measurement, Path()))
    return measurement


def _ranks(measurement: Measurement, directory: Path) -> Ranks:
    return Ranks(
        num_processes=measurement.num_processes,
        module=("compare.collectives.rank", str(directory)),
        device=measurement.device,
        num_threads=measurement.threads_per_rank,
        master_port=None,
        timeout_seconds=measurement.timeout,
        log_directory=directory / LOGS_NAME,
    )


def _rows(text: str | None) -> dict[str, BackendRow]:
    """The backends that were named, or each that is a path of its own and can run here."""
    if text is None:
        return {
            name: row for name, row in BACKENDS.items() if row.has_own_collectives and row.unavailable_reason() is None
        }
    rows = {name: find_backend(name) for name in _each(text, str)}
    for name, row in rows.items():
        reason = row.unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"{name} cannot run here: {reason}")
    return rows


def _say_what_is_left_out(terminal: Console) -> None:
    for name, row in BACKENDS.items():
        if row.communicates_like is not None and row.unavailable_reason() is None:
            terminal.print(
                f"{name} is left out: it uses the collectives of {row.communicates_like} (--backends {name})"
            )


def _each(text: str, parse: Callable[[str], T]) -> list[T]:
    """Parses a list with commas, leaving out what comes again."""
    return list(dict.fromkeys(parse(word.strip()) for word in text.split(",")))


def _world_size(word: str) -> int:
    number = _number("--num-processes", word, int, 1, _MAX_PROCESSES)
    if number == 1:
        raise UsageError("--num-processes 1: a rank alone has nobody to communicate with; choose 2 or more")
    return number


def _operation(word: str) -> str:
    if word not in OPERATIONS:
        raise UsageError(f"--operations {word}: there is no such collective; choose from {', '.join(OPERATIONS)}")
    return word


Number = TypeVar("Number", int, float)


def _number(option: str, text: str, kind: type[Number], low: float, high: float) -> Number:
    try:
        number = kind(text)
    except ValueError as error:
        what = "whole number" if kind is int else "number"
        raise UsageError(f"{option} {text}: is no {what}; give one from {low:g} to {high:g}") from error
    if not low <= number <= high:  # nan, too
        raise UsageError(f"{option} {text}: give a number from {low:g} to {high:g}")
    return number


def parse_sizes(text: str) -> list[int]:
    """Reads sizes such as ``1KB,64KB`` or ``1KB..256MB``, where each is four times the one before.

    Returns:
        Bytes, from the smallest up; both ends of a range are among them.

    Raises:
        UsageError: It is no list of sizes, or one of them is no whole number of float32 values.
    """
    sizes: set[int] = set()
    for word in text.split(","):
        first, dots, last = (part.strip() for part in word.partition(".."))
        low = _size(first)
        high = _size(last) if dots else low
        if high < low:
            raise UsageError(f"--sizes {word}: the range ends below its beginning; write {last}..{first}")
        while low < high:
            sizes.add(low)
            low *= _STEP
        sizes.add(high)
    return sorted(sizes)


def _size(word: str) -> int:
    match = re.fullmatch(r"([0-9]+) *([a-z]*)", word, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"--sizes {word}: is no size; write a number with B, KB, MB or GB, such as 64KB or 1KB..256MB")
    # A number with more digits than this is too large in any unit, and int() refuses thousands of them.
    num_bytes = int(match[1]) * _UNITS[match[2].upper()] if len(match[1]) < 20 else math.inf
    if num_bytes > _MAX_BYTES:
        raise UsageError(f"--sizes {word}: choose sizes up to {format_size(_MAX_BYTES)}")
    if num_bytes == 0 or num_bytes % ELEMENT_BYTES:
        raise UsageError(f"--sizes {word}: choose a multiple of {ELEMENT_BYTES} bytes, which a float32 value has")
    return int(num_bytes)


def format_size(num_bytes: int) -> str:
    """The size in its largest unit that needs no fraction."""
    unit = next(unit for unit in ("GB", "MB", "KB", "B") if num_bytes % _UNITS[unit] == 0)
    return f"{num_bytes // _UNITS[unit]} {unit}"


def _target(path: Path | None) -> Path:
    """Settles where results go; only the default's directory may have to be made."""
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
        raise UsageError(f"--output {target}: another run has just written it; choose another file")
    content = CollectivesFile(
        kind="collectives",
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        environment=describe_environment(with_torch=True),
        series=series,
    )
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, content.model_dump_json(indent=1) + "\n")


class _Job:
    """One group of ranks, and what it has measured."""

    def __init__(self, measurement: Measurement, directory: Path, terminal: Console) -> None:
        self._measurement, self._directory, self._terminal = measurement, directory, terminal
        self._news = ProgressReader(directory)
        self._transport = ""
        self._operations: list[str] = []
        self._points: list[tuple[str, CollectivePoint]] = []

    def run(self) -> JobFailure | None:
        """Starts the ranks and returns None once all have measured everything, or why they have not."""
        measurement, directory = self._measurement, self._directory
        (directory / LOGS_NAME).mkdir(parents=True)
        (directory / MEASUREMENT_NAME).write_text(measurement.model_dump_json())
        engine, signs = find_engine(measurement.start_method), find_backend(measurement.backend).signs
        job = compose_job(engine, _ranks(measurement, directory), directory, signs)
        began = time.monotonic()
        with self._progress() as refresh:
            failure = run_job(job, on_poll=refresh)
        if failure is None:
            seconds = time.monotonic() - began
            self._terminal.print(f"{self._title}: {len(self._points)} points over {self._transport} in {seconds:.0f} s")
            for operation in measurement.operations:
                if operation not in self._operations:
                    self._terminal.print(f"{measurement.backend} has no {operation}: left out")
        return failure

    @property
    def series(self) -> list[CollectiveSeries]:
        """What was measured, one series for each operation."""
        series = []
        for operation, pairs in groupby(self._points, key=lambda pair: pair[0]):
            points = [point for _, point in pairs]
            series.append(
                CollectiveSeries(
                    backend=self._measurement.backend,
                    transport=self._transport,
                    operation=operation,
                    num_processes=self._measurement.num_processes,
                    device=self._measurement.device,
                    points=points,
                    fit=fit_line(points),
                )
            )
        return series

    @property
    def _title(self) -> str:
        measurement = self._measurement
        return f"{measurement.backend}, {measurement.num_processes} x {measurement.device}"

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """Shows on a terminal how far the ranks are; gives what is to be called now and then."""
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._terminal,
            transient=True,
            auto_refresh=False,  # a thread would take time from the ranks
            disable=not self._terminal.is_terminal,
        )
        task = bar.add_task(f"{self._title}: starting ranks", total=None)

        def refresh() -> None:
            news = self._news.news()
            for item in news:
                self._take(item)
            if news:
                what = (
                    f"{self._points[-1][0]} of {format_size(self._points[-1][1].bytes)}" if self._points else "joined"
                )
                num_points = len(self._operations) * len(self._measurement.sizes)
                bar.update(task, description=f"{self._title}: {what}", total=num_points, completed=len(self._points))
                bar.refresh()

        with bar:
            yield refresh

    def _take(self, news: News) -> None:
        match news:
            case LibraryFound():
                self._transport, self._operations = news.transport, news.operations
            case PointMeasured(operation=operation):
                point = collective_point(operation, self._measurement.num_processes, news.bytes, news.seconds)
                self._points.append((operation, point))


def show(series: list[CollectiveSeries], terminal: Console) -> None:
    """Prints a table for each operation in each world, and what was fitted below it."""
    keys = dict.fromkeys((one.num_processes, one.operation) for one in series)
    for num_processes, operation in keys:
        shown = [one for one in series if (one.num_processes, one.operation) == (num_processes, operation)]
        terminal.print(f"\n{operation}, {num_processes} ranks (median time of the slowest rank; GB/s)")
        table = _table(shown)
        # A number that does not fit would be cut short, and then be another number.
        table.width = Width.get(terminal, terminal.options.update(width=_ANY_WIDTH), table).maximum
        terminal.print(table, crop=False)
        for one in shown:
            terminal.print(f"{one.backend} ({one.transport} on {one.device}): {_describe_fit(one)}")


def _table(shown: list[CollectiveSeries]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ["\nsize", *(f"{name}\n{one}" for series in shown for name, one in _headings(series))]:
        table.add_column(heading, justify="right", no_wrap=True)
    for points in zip(*(series.points for series in shown), strict=True):
        cells = [
            cell
            for point in points
            for cell in (format_seconds(point.median_seconds), f"{point.algbw / 1e9:.3g}", f"{point.busbw / 1e9:.3g}")
        ]
        table.add_row(format_size(points[0].bytes), *cells)
    return table


def _headings(series: CollectiveSeries) -> list[tuple[str, str]]:
    return [(series.backend.rpartition(":")[2], "time"), ("", "algbw"), ("", "busbw")]


def _describe_fit(series: CollectiveSeries) -> str:
    if series.fit is None:
        return "no line fitted, which takes three sizes over which the time grows"
    latency = _describe_interval(series.fit.latency_seconds, format_seconds)
    bandwidth = _describe_interval(series.fit.bytes_per_second, lambda rate: f"{rate / 1e9:.3g} GB/s")
    return f"time = latency {latency} + size / {bandwidth}"


def _describe_interval(interval: Interval, describe: Callable[[float], str]) -> str:
    low, high = (None if end is None else describe(end) for end in (interval.low, interval.high))
    return f"{describe(interval.estimate)} ({low} to {high or 'any'})"


def format_seconds(seconds: float) -> str:
    """Three digits in the unit that suits them."""
    unit, scale = next(
        (unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * scale >= 1 or unit == "us"
    )
    return f"{seconds * scale:.3g} {unit}"
