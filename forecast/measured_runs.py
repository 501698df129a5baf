"""The runs that a forecast is held against: each of its trainings, on hosts in network namespaces of this machine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from backends.registry import find_backend
from forecast.result import Forecast, ForecastFile, Row
from launch import own_command
from launch.errors import UsageError
from launch.options import settings_in
from records.files import write_atomically
from records.names import RECORD_NAME
from records.record import read_record

# They would take time that is not forecast.
_NO_OTHER_WORK = ("--save-every=never", "--no-evaluate")
_NO_LATENCY = ",latency=0us"
_SERIES_NAME = "options.json"


class _Series(NamedTuple):
    """What all runs of a directory have in common; an earlier version did not note the forecast."""

    options: list[str]
    forecast_created_at: str | None


class RunFailed(Exception):
    """A run did not complete; the message says which one, and why."""


def train_what_was_forecast(
    forecasts: ForecastFile, directory: Path, options: list[str], say: Callable[[str], None]
) -> list[tuple[str, Path]]:
    """Trains as long as it takes to measure, once for each backend, network and number of ranks.

    Runs whose record is there already are left alone, so that a series that was interrupted goes on.

    Args:
        forecasts: What was forecast; each network must have a bandwidth, and no links within a node.
        directory: Receives a directory for each run.
        options: Options of the training that was profiled, and how many steps to take.
        say: Is told what runs now.

    Returns:
        For each run, the network and the path of its record.

    Raises:
        RunFailed: A run did not complete.
        UsageError: A file that is there already is no record, the runs that are there had other options or are for
            another forecast, or the options are among those that a forecast holds.
        UnsupportedError: A backend is not on this machine.
    """
    for backend in dict.fromkeys(one.backend for one in forecasts.forecasts):
        if given := settings_in(find_backend(backend).settings, options).model_fields_set:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise UsageError(f"{names}: the forecast holds the options of {backend} alone; leave it out")
    _require_same_series(directory, _Series(options, forecasts.created_at))
    found = []
    # Networks and backends take turns, so that a drift of the machine meets all of them.
    by_size = sorted(((row, one) for one in forecasts.forecasts for row in one.rows), key=lambda pair: pair[0].ranks)
    for row, one in by_size:
        name = f"{one.name}-{row.ranks}-{one.network.replace(_NO_LATENCY, '')}"
        place = directory / re.sub(r"[^A-Za-z0-9.]+", "-", name)
        if not _is_complete(place):
            say(f"{one.name}, {row.ranks} ranks, {one.network}")
            _train(one, row, place, options)
        found.append((one.network, own_command.directory_of_record(place) / RECORD_NAME))
    return found


def _require_same_series(directory: Path, asked: _Series) -> None:
    """Notes what a series of runs is, or refuses another than the one that began there."""
    path = directory / _SERIES_NAME
    try:
        before = _noted(json.loads(path.read_bytes())) if path.exists() else asked
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(before._asdict()) + "\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be used ({error}); name another directory") from error
    if before.options != asked.options:
        raise UsageError(
            f"{directory}: its runs have the options {shlex.join(before.options)!r} instead of "
            f"{shlex.join(asked.options)!r}; give the same, or name another directory"
        )
    # Its trainings may be others, and its runs began before a later forecast.
    if before.forecast_created_at not in (None, asked.forecast_created_at):
        raise UsageError(
            f"{directory}: its runs are for the forecast of {before.forecast_created_at} instead of that of "
            f"{asked.forecast_created_at}; give the same, or name another directory"
        )


def _noted(content: Any) -> _Series:
    # Earlier versions noted the options alone.
    match {"options": content, "forecast_created_at": None} if isinstance(content, list) else content:
        case {"options": [*options], "forecast_created_at": (str() | None) as created_at}:
            return _Series([str(option) for option in options], created_at)
    raise ValueError("it does not tell the options of runs")


def _is_complete(place: Path) -> bool:
    try:
        record = own_command.directory_of_record(place) / RECORD_NAME
        return record.exists() and read_record(record).status == "completed"
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: holds a damaged record; remove it, or name another directory") from error


def _train(one: Forecast, row: Row, place: Path, options: list[str]) -> None:
    # What forecasts say of a network has the names of the engine's options.
    bandwidth, *facts = one.network.replace(_NO_LATENCY, "").split(",")
    arguments = [
        *(
            one.backend,
            *one.own_options,
            "--engine=netns",
            f"--bandwidth={bandwidth}",
            *(f"--{fact}" for fact in facts),
        ),
        *(f"--num-nodes={row.ranks}", f"--num-processes={row.ranks}"),
        *(f"--global-batch-size={row.ranks * one.samples_per_rank}", *_NO_OTHER_WORK),
        *(*options, f"--output-dir={place}", "--overwrite"),
    ]
    done = own_command.run_command(arguments)
    why = own_command.why_it_failed(done, place)
    if why is not None:
        raise RunFailed(f"{one.name} with {row.ranks} ranks on {one.network} did not complete: {why}")
