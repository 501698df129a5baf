"""``launch/run.sh forecast``: how long a step takes on other numbers of ranks and other networks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from backends.registry import BACKENDS
from compare.collectives.measurement import read_collectives
from compare.collectives.selection import changing_collectives
from compare.report.pages import require_packages
from compare.strict import named
from forecast import profile_command
from forecast.network import UNLIMITED, Network, parse_network, read_measured
from forecast.options import ForecastOptions, is_file
from forecast.profile import Collective, Profile
from forecast.result import Forecast, ForecastFile, forecast, forecast_file
from forecast.runs import fits_of
from forecast.scenario import NotMeasured, Scenario, Variant
from forecast.sending import WAYS
from forecast.source import read_source
from forecast.table import show
from launch.arguments import Parser, command_line, require_new_file
from launch.display import console
from launch.errors import UsageError
from launch.options import add_options, validated
from records.files import write_atomically


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0.

    Raises:
        UsageError, UnsupportedError, TaskInputError: The request cannot be served.
    """
    require_packages()
    if arguments[:1] == ["profile"]:
        return profile_command.run(arguments[1:])
    parser = Parser(
        "forecast",
        argument_default=argparse.SUPPRESS,
        description="Says how long a step takes, how efficient it is and what an epoch costs on numbers of ranks and "
        "networks that are not at hand, from what was measured on one machine: forecast profile BACKEND measures it.",
        epilog="The formulas, their sources and what they cannot see are in docs/forecast.md.",
    )
    add_options(parser, {"forecast": ForecastOptions})
    options: ForecastOptions = validated(ForecastOptions, vars(parser.parse_args(arguments)))
    require_new_file("--output", options.output)
    profiles = [
        read_source(option, path)
        for option, paths in (("--profile", options.profile), ("--record", options.record))
        for path in paths
    ]
    networks = [_network(text) for text in options.network]
    found = [_forecast(profile, network, options) for profile, network in product(profiles, networks)]
    terminal = console()
    for one in found:
        show(one, terminal)
    if options.output is not None:
        command = command_line(["forecast", *arguments], without="--output")
        write_atomically(options.output, _content(forecast_file(command, found), options.output))
        terminal.print(f"\nforecast in {options.output}")
    return 0


class _Asked(NamedTuple):
    """A network as --network names it: in words, or by a file with all-reduces that were measured on it, by backend.

    Attributes:
        text: The words, or the name of the file.
        name: What forecasts call it.
        stated: What limits it.
        measured: The all-reduces.
    """

    text: str
    name: str
    stated: Network
    measured: Mapping[str, list[Collective]]


def _network(text: str) -> _Asked:
    """Reads a network, or the lines through all-reduces that were measured on it."""
    if not is_file(text):
        stated = parse_network(text)
        return _Asked(text, stated.text, stated, {})
    try:
        content = read_collectives(Path(text))
        name, stated = read_measured(content.network) if content.network else (Path(text).stem, UNLIMITED)
    except OSError as error:
        raise UsageError(f"--network {text}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"--network {text}: is no file of launch/run.sh allreduce; name one") from error
    fits = fits_of(content.series)
    if not fits:
        raise UsageError(
            f"--network {text}: has no line through all-reduces; measure three sizes or more (launch/run.sh allreduce)"
        )
    return _Asked(text, name, stated, fits)


def _measured(profile: Profile, asked: _Asked) -> list[Collective]:
    """Returns what was measured on a network of all-reduces of a backend, or of one that communicates as it does.

    Raises:
        UsageError: Nothing was.
    """
    row = BACKENDS.get(profile.backend)
    changing = changing_collectives(profile.backend, profile.own_options)
    wanted = named(profile.backend, changing)
    for name in (wanted, row.communicates_like if row is not None and not changing else None):
        if name is not None and name in asked.measured:
            _require_transport(profile, asked, name)
            return asked.measured[name]
    raise UsageError(
        f"--network {asked.text}: has all-reduces of {', '.join(asked.measured)}, but none of {wanted}; "
        f"measure them (launch/run.sh allreduce --backends {wanted})"
    )


def _require_transport(profile: Profile, asked: _Asked, name: str) -> None:
    for one in asked.measured[name]:
        if one.transport != profile.transport:
            raise UsageError(
                f"--network {asked.text}: its all-reduces of {name} went over {one.transport}, and the profile's "
                f"gradients over {profile.transport}; measure them with the profile's --device and --start-method"
            )


def _forecast(profile: Profile, asked: _Asked, options: ForecastOptions) -> Forecast:
    measured = _measured(profile, asked) if asked.measured else []
    scenario = Scenario(
        profile,
        asked.stated,
        name=asked.name,
        measured=tuple(measured),
        ranks_per_node=options.ranks_per_node,
        same_machine=options.same_machine,
        slow_down=options.slow_down_of_computing,
    )
    own = options.sending in (None, profile.sending.way)
    sending = profile.sending if own or options.sending is None else WAYS[options.sending]
    try:
        return forecast(scenario, Variant(options.algorithm, sending), options.ranks, options.cost_per_hour)
    except NotMeasured as error:
        raise UsageError(f"--same-machine: {error}") from error


def _content(content: ForecastFile, target: Path) -> str:
    if target.suffix == ".json":
        return content.model_dump_json(indent=1) + "\n"
    from forecast.report import render

    return render(content)
