"""One group of ranks that measures collectives: how it is started, followed and read."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backends.registry import find_backend
from compare.collectives.cluster import Cluster
from compare.collectives.measurement import MEASUREMENT_NAME, Measurement, collective_point, fit_line
from compare.numbers import format_size
from compare.results import CollectivePoint, CollectiveSeries
from launch import own_command
from launch.allocator import settle_allocator
from launch.job import compose_job
from launch.starters.interface import Ranks
from launch.starters.registry import find_starter
from launch.supervisor import run_job
from records.names import LOGS_NAME
from records.news import LibraryFound, News, PointMeasured
from records.progress import ProgressReader
from records.record import Environment


def ranks_of(measurement: Measurement, directory: Path) -> Ranks:
    """Describes the ranks that make a measurement to the starter that starts them."""
    return Ranks(
        num_processes=measurement.num_processes,
        module=("compare.collectives.rank", str(directory / MEASUREMENT_NAME), str(directory)),
        device=measurement.device,
        num_threads=measurement.threads_per_rank,
        master_port=None,
        timeout_seconds=measurement.timeout,
        log_directory=directory / LOGS_NAME,
        preload=settle_allocator("auto").library,  # as the ranks of a training, unless these are told otherwise
    )


class MeasuringJob:
    """One group of ranks, and what it has measured.

    Attributes:
        environment: That of rank 0; None until its ranks have met.
    """

    def __init__(
        self,
        measurement: Measurement,
        directory: Path,
        terminal: Console,
        cluster: Cluster | None = None,
        which_start: str = "",
    ) -> None:
        """Settles what is measured.

        Args:
            measurement: What to measure.
            directory: Where to; it does not exist yet.
            terminal: Receives a line, and shows how far the ranks are.
            cluster: The nodes on which the ranks are started; None where all are on this one.
            which_start: Goes behind what is measured in all that is told.
        """
        self.environment: Environment | None = None
        self._measurement, self._directory, self._terminal = measurement, directory, terminal
        self._cluster, self._which_start = cluster, which_start
        self._transport = ""
        self._operations: list[str] = []
        self._points: list[tuple[str, CollectivePoint]] = []

    def run(self) -> str | None:
        """Starts the ranks and waits for them; returns None once they have measured everything, or why they failed."""
        measurement, directory = self._measurement, self._directory
        (directory / LOGS_NAME).mkdir(parents=True)
        (directory / MEASUREMENT_NAME).write_text(measurement.model_dump_json())
        began = time.monotonic()
        failure = self._run_here() if self._cluster is None else self._run_on(self._cluster)
        if failure is None:
            seconds = time.monotonic() - began
            self._terminal.print(f"{self._title}: {len(self._points)} points over {self._transport} in {seconds:.0f} s")
        return failure

    @property
    def left_out(self) -> list[str]:
        """The operations that were asked for and that the library does not have, once the ranks have measured."""
        return [operation for operation in self._measurement.operations if operation not in self._operations]

    def _run_here(self) -> str | None:
        measurement, directory = self._measurement, self._directory
        starter, signs = find_starter(measurement.start_method), find_backend(measurement.backend).signs
        job = compose_job(starter, ranks_of(measurement, directory), directory, signs)
        with self._progress() as refresh:
            failure = run_job(job, on_poll=refresh)
        return None if failure is None else f"{failure}{failure.where_to_read_more}"

    def _run_on(self, cluster: Cluster) -> str | None:
        """Has the nodes started as those of any training, with other ranks, whose times are read when they have ended.

        A progress bar would take time from the ranks, which may share the cores of this machine with it.
        """
        measurement, nodes = self._measurement, self._directory / "nodes"
        if cluster.is_elsewhere:  # it may have to wait for its turn
            self._terminal.print(f"{self._title}: given to {cluster.engine}; what its nodes print is in {nodes}")
        program = shlex.join(("compare.collectives.rank", str(self._directory / MEASUREMENT_NAME)))
        done = own_command.run_command(
            [measurement.backend, *cluster.options(measurement), f"--output-dir={nodes}"],
            module=("engines.other_ranks", program),
        )
        why = own_command.why_it_failed(done, nodes)
        if why is not None:
            return f"{why}; more in {nodes}"
        for node in sorted(nodes.glob("node*/")):
            for fact in ProgressReader(node).news():
                self._take(fact)
        return None

    @property
    def series(self) -> list[CollectiveSeries]:
        """What was measured, one series for each operation."""
        series = []
        for operation, pairs in groupby(self._points, key=lambda pair: pair[0]):
            points = [point for _, point in pairs]
            series.append(
                CollectiveSeries(
                    backend=self._measurement.backend,
                    own_options=self._measurement.own_options,
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
        return f"{measurement.name}, {measurement.num_processes} x {measurement.device}{self._which_start}"

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """Shows on a terminal how far the ranks are; yields the function to call now and then."""
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

        news = ProgressReader(self._directory)

        def refresh() -> None:
            facts = news.news()
            for fact in facts:
                self._take(fact)
            if facts:
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
                self.environment = news.environment
            case PointMeasured(operation=operation):
                point = collective_point(operation, self._measurement.num_processes, news.bytes, news.seconds)
                self._points.append((operation, point))
