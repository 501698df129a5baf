"""``launch/run.sh forecast``: how long a step takes on other numbers of ranks and other networks."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from compare.report.pages import require_packages
from forecast import profile_command
from forecast.network import Network, parse_network
from forecast.options import ForecastOptions, is_file
from forecast.profile import Profile
from forecast.result import Forecast, ForecastFile, forecast, forecast_file
from forecast.runs import collectives_in
from forecast.scenario import NotMeasured, Scenario, Variant, link_of
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
    found = [
        _forecast(profile, network, text, options)
        for profile, (network, text) in product(profiles, zip(networks, options.network, strict=True))
    ]
    terminal = console()
    for one in found:
        show(one, terminal)
    if options.output is not None:
        command = command_line(["forecast", *arguments], without="--output")
        write_atomically(options.output, _content(forecast_file(command, found), options.output))
        terminal.print(f"\nforecast in {options.output}")
    return 0


def _network(text: str) -> Network:
    """Reads a network, or the line through all-reduces that were measured on it."""
    if not is_file(text):
        return parse_network(text)
    try:
        fits = collectives_in(Path(text))
    except OSError as error:
        raise UsageError(f"--network {text}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"--network {text}: is no file of launch/run.sh allreduce; name one") from error
    if not fits:
        raise UsageError(
            f"--network {text}: has no line through all-reduces; measure three sizes or more (launch/run.sh allreduce)"
        )
    return Network(link_of(fits[0]))


def _forecast(profile: Profile, network: Network, text: str, options: ForecastOptions) -> Forecast:
    scenario = Scenario(
        profile,
        network,
        software=not is_file(text),
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
