"""How far forecasts were from what was measured later: ``python -m forecast.validation``.

``run FORECAST DIRECTORY [OPTIONS]`` makes the trainings that were forecast, in network namespaces of this machine, and
prints a file of measured step times; ``measured NETWORK@RECORD ...`` makes this file of the records of other runs.
``compare FORECAST MEASURED ...`` prints the table of errors. Of several runs of a kind, their median counts, and it
is said how far they differ. Forecasts that are younger than a measurement are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Literal, NamedTuple, TypeVar, get_args

from pydantic import Field, ValidationError
from rich.table import Table

from backends.registry import find_backend
from compare.numbers import number
from compare.results import Interval
from compare.strict import OfBackend, Strict
from forecast.measured_runs import RunFailed, train_what_was_forecast
from forecast.network import read_measured
from forecast.result import Forecast, ForecastFile
from launch.cli import answer
from launch.display import console
from launch.errors import UsageError, tell
from launch.options import own_options, read_options
from launch.signals import Interrupted, signals_raised
from records.environment import num_cpus
from records.names import RECORD_NAME
from records.record import RunRecord, read_record
from records.throughput import NUM_WARMUP_STEPS

# It waits where others compute, so that its ranks need no cores of their own (tasks/paced.py).
_WAITING_TASK = "paced"


class MeasuredSteps(OfBackend):
    """The steps of one run."""

    network: str = Field(description="what limited it, as forecasts write it")
    ranks: int = Field(ge=1)
    started_at: datetime
    samples_per_rank: float | None = Field(default=None, description="of a whole global batch; null in older files")
    gradient_bytes: int | None = Field(default=None, description="of all gradients; null in older files")
    step_seconds: list[float] = Field(min_length=1, description="of the slowest rank, after the warm-up")


class MeasuredFile(Strict):
    """What was measured."""

    schema_version: Literal[1] = 1
    kind: Literal["measured steps"] = "measured steps"
    runs: list[MeasuredSteps] = Field(min_length=1)


_File = TypeVar("_File", ForecastFile, MeasuredFile)


class Comparison(NamedTuple):
    """A forecast beside what was measured, in seconds; of each run, its median step."""

    name: str
    network: str
    ranks: int
    forecast: Interval
    runs: list[float]

    @property
    def measured(self) -> float:
        """The median of the runs."""
        return median(self.runs)

    @property
    def error(self) -> float:
        """By which share of the measured time the forecast was too long."""
        return self.forecast.estimate / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether what was measured lies within the interval of the forecast."""
        low, high = (self.forecast.estimate if end is None else end for end in (self.forecast.low, self.forecast.high))
        return low <= self.measured <= high

    @property
    def difference(self) -> float | None:
        """By which share the longest run is longer than the shortest one; None of a single run."""
        return max(self.runs) / min(self.runs) - 1 if len(self.runs) > 1 else None


def measured_steps(network: str, record: RunRecord) -> MeasuredSteps:
    """Returns the steps of a run.

    Args:
        network: What limited it, or what it is called, as `read_measured` reads it.
        record: The record of the run.

    Raises:
        UsageError: The run has no step after its warm-up.
    """
    steps = [max(step) for step in zip(*(rank.step_seconds for rank in record.ranks), strict=True)]
    if len(steps) <= NUM_WARMUP_STEPS:
        raise UsageError(f"the run has no step after the {NUM_WARMUP_STEPS} of its warm-up; train longer")
    config, memory = record.config, record.ranks[0].memory
    return MeasuredSteps(
        backend=config.backend,
        own_options=own_options(config.backend, config.backend_settings),
        network=read_measured(network)[0],
        ranks=config.num_processes,
        started_at=datetime.fromtimestamp(config.started_at, timezone.utc),
        samples_per_rank=config.global_batch_size / config.num_processes,
        gradient_bytes=memory.gradient_bytes if memory else None,
        step_seconds=steps[NUM_WARMUP_STEPS:],
    )


def compare(forecasts: ForecastFile, measured: MeasuredFile) -> list[Comparison]:
    """Returns what was measured beside its forecast, in the order of the first run of each kind.

    Raises:
        UsageError: A run has no forecast, began before the forecasts were made, or did other work.
    """
    made_at = datetime.fromisoformat(forecasts.created_at)
    rows: dict[tuple[str, str, int], tuple[Forecast, Interval]] = {}
    for one in forecasts.forecasts:
        for row in one.rows:
            if (key := (one.name, one.network, row.ranks)) in rows:
                raise UsageError(f"{one.name} has two forecasts on {one.network}; make a forecast with one of them")
            rows[key] = one, row.step_seconds
    runs: dict[tuple[str, str, int], list[float]] = {}
    for run in measured.runs:
        what = f"{run.name} with {run.ranks} ranks on {run.network}"
        if run.started_at <= made_at:
            raise UsageError(f"{what}: was measured before the forecast of {forecasts.created_at}; forecast first")
        key = (run.name, run.network, run.ranks)
        if key not in rows:
            there = ", ".join(f"{name} with {ranks} ranks on {network}" for name, network, ranks in rows)
            raise UsageError(f"{what}: has no forecast; leave the run out, or forecast it, too (there are {there})")
        _require_same_work(what, run, rows[key][0])
        runs.setdefault(key, []).append(median(run.step_seconds))
    return [Comparison(*key, rows[key][1], seconds) for key, seconds in runs.items()]


def _require_same_work(what: str, run: MeasuredSteps, forecast: Forecast) -> None:
    for unit, done, expected in (
        ("samples of each rank in a step", run.samples_per_rank, forecast.samples_per_rank),
        ("bytes of gradients", run.gradient_bytes, forecast.gradient_bytes),
    ):
        if done is not None and expected is not None and done != expected:
            raise UsageError(
                f"{what}: has {done:,.12g} {unit}, and the forecast is of {expected:,.12g}; train what was profiled, "
                "with the same model, data and batch"
            )


def summary(comparisons: Sequence[Comparison]) -> str:
    """Says how large the errors are, and how far runs of the same kind differ."""
    errors = [abs(one.error) for one in comparisons]
    inside = sum(one.is_inside for one in comparisons)
    found = (
        f"mean absolute error {100 * fmean(errors):.1f} %, worst {100 * max(errors):.1f} %; {inside} of {len(errors)} "
        "measured steps are within their intervals"
    )
    differences = [one.difference for one in comparisons if one.difference is not None]
    if differences:
        mean, worst = 100 * fmean(differences), 100 * max(differences)
        found += f"; runs of the same kind differ by {mean:.1f} % on average, and by {worst:.1f} % at most"
    return found


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: Something in the files cannot be used.
    """
    match arguments:
        case ["run", forecast, directory, *options]:
            return _train(_read(forecast, ForecastFile), Path(directory), options)
        case ["measured", first, *others]:
            runs = [_read_run(word) for word in (first, *others)]
            print(MeasuredFile(runs=runs).model_dump_json(indent=1))
        case ["compare", forecast, first, *others]:
            forecasts = _read(forecast, ForecastFile)
            files = [_read(name, MeasuredFile) for name in (first, *others)]
            comparisons = compare(forecasts, MeasuredFile(runs=[run for file in files for run in file.runs]))
            terminal = console()
            terminal.print(_table(comparisons))
            terminal.print(summary(comparisons))
        case _:
            raise UsageError(
                "python -m forecast.validation run FORECAST DIRECTORY [OPTIONS] makes the runs and a file of what they "
                "took; measured NETWORK@RECORD ... makes that of other runs; compare FORECAST MEASURED ... compares"
            )
    return 0


def _train(forecasts: ForecastFile, directory: Path, options: list[str]) -> int:
    """Makes the runs and prints what they took; returns 0, or 1 if a run failed, or what a signal asks for."""
    for one in forecasts.forecasts:
        _require_such_hosts(one, options)
    if any(one.has_own_machines for one in forecasts.forecasts):
        tell(
            "forecasts without --same-machine are of ranks that share nothing: what they take from each other on this "
            "machine is part of their errors"
        )
    try:
        with signals_raised():
            found = train_what_was_forecast(forecasts, directory, options, tell)
    except RunFailed as failure:
        tell(str(failure))
        return 1
    except Interrupted as interruption:
        tell(f"interrupted by {interruption}; the same command goes on")
        return 128 + interruption.signal_number
    runs = [measured_steps(network, read_record(record)) for network, record in found]
    print(MeasuredFile(runs=runs).model_dump_json(indent=1))
    return 0


def _require_such_hosts(one: Forecast, options: list[str]) -> None:
    """Refuses a forecast of something else than hosts on this machine do."""
    if not one.network[0].isdigit() or ",local=" in one.network:
        raise UsageError(
            f"{one.network}: hosts on this machine have a bandwidth and no links within a node; forecast for such, "
            "or train there and give the records to python -m forecast.validation measured"
        )
    if one.is_as_profiled is False and one.has_own_machines is None:
        raise UsageError(f"{one.name} on {one.network}: the forecast is of an earlier version; make it again")
    if one.is_as_profiled is False and not one.has_own_machines:
        raise UsageError(
            f"{one.name} on {one.network}: hosts on this machine have one rank each, which computes and sends as in "
            "the profile; forecast without --ranks-per-node, --slow-down-of-computing, --algorithm and --sending"
        )
    if one.has_own_machines:
        asked = read_options(one.backend, find_backend(one.backend).settings, options).run
        if asked.threads_per_rank is None:
            raise UsageError(f"{one.name} on {one.network}: give --threads-per-rank, as it was in the profile")
        needed = max(row.ranks for row in one.rows) * asked.threads_per_rank
        if asked.task != _WAITING_TASK and needed > num_cpus():
            raise UsageError(
                f"{one.name} on {one.network}: ranks that were forecast without --same-machine need {needed} cores of "
                f"their own, and this machine has {num_cpus()}; forecast with --same-machine, or fewer ranks, or train "
                f"--task {_WAITING_TASK}, which waits instead of computing"
            )


def _read_run(word: str) -> MeasuredSteps:
    network, at, name = word.partition("@")
    if not (network and at):
        raise UsageError(f"{word}: write the network and the record of the run, such as 1gbit@runs/a")
    path = Path(name)
    try:
        return measured_steps(network, read_record(path / RECORD_NAME if path.is_dir() else path))
    except OSError as error:
        raise UsageError(f"{word}: the record cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise UsageError(f"{word}: is no record of this Lockstep; name the directory of a run") from error
    except ValueError as error:
        raise UsageError(f"{word}: {error}") from error


def _read(name: str, kind: type[_File]) -> _File:
    try:
        return kind.model_validate_json(Path(name).read_bytes())
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        wanted, versions = kind.model_fields["kind"].default, get_args(kind.model_fields["schema_version"].annotation)
        which = " or ".join(map(str, versions))
        raise UsageError(f"{name}: is no file of the kind '{wanted}', version {which}") from error


def _table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("backend", "network"):
        table.add_column(heading)
    for heading in ("ranks", "forecast, ms", "measured, ms", "error, %", "in its interval", "runs differ by, %"):
        table.add_column(heading, justify="right")
    for one in comparisons:
        seconds = [number(1e3 * value, 4) for value in (one.forecast.estimate, one.measured)]
        inside = "yes" if one.is_inside else "no"
        differ = "" if one.difference is None else f"{100 * one.difference:.1f}"
        table.add_row(one.name, one.network, str(one.ranks), *seconds, f"{100 * one.error:+.1f}", inside, differ)
    return table


if __name__ == "__main__":
    sys.exit(answer(lambda: run(sys.argv[1:])))
