"""How long a race is expected to take, and how long it takes: ``python -m tests.estimates DIRECTORY`` prints a table.

Races of several kinds are planned by a dry run, and then made. The first estimate of the bar is what the race says is
left when its first run is over, and the time until then. Durations are those that a user sees, in whole minutes above
90 s; what a race takes is the time of the whole command, with its collectives and its report.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launch.starters.environment import command_environment
from launch.starters.interface import PROJECT_DIRECTORY

_DDP = ("--backends", "ddp", "--num-processes", "2", "--no-limits")
_SLIM = ("--entrant", "slim=ddp:--bucket-cap-mb 1")
# Collectives take half a minute of the few minutes that a race has here, so that only one kind measures them.
_ALONE = (*_DDP, "--no-collectives")
_TWO = (*_ALONE, *_SLIM)
KINDS = {
    "two entrants": _TWO,
    "loops by hand": (*_ALONE, "--bare"),
    "two hosts": (*_TWO, "--engine", "netns", "--bandwidth", "1gbit"),
    "one rank": ("--backends", "single,ddp", "--num-processes", "1", "--no-limits"),
    "whole runs": (*_TWO, "--whole-runs"),
    "collectives": (*_DDP, *_SLIM),
}
_UNITS = {"s": 1.0, "min": 60.0}
_HEADINGS = ("race", "dry run (s)", "bar at first (s)", "took (s)", "took / dry run", "took / bar")


class Refused(Exception):
    """A command ended with an error; the text is the last line that it printed."""


class Taken(NamedTuple):
    """One race, in seconds.

    Attributes:
        planned: What the dry run expects.
        first: What the bar expects at first; None if it never said.
        took: What the command took.
    """

    planned: float
    first: float | None
    took: float

    def cells(self) -> list[str]:
        """Returns what the table shows of it."""
        first = "-" if self.first is None else f"{self.first:.0f}"
        ratios = ["-" if not one else f"{self.took / one:.2f}" for one in (self.planned, self.first)]
        return [f"{self.planned:.0f}", first, f"{self.took:.0f}", *ratios]


def seconds_in(text: str) -> float | None:
    """Returns the last duration in a text that is said to be about right; None if there is none."""
    found = re.findall(r"\babout (\d+)(s|min)\b", text)
    return float(found[-1][0]) * _UNITS[found[-1][1]] if found else None


def command_of(options: Sequence[str], budget: str, place: Path) -> list[str]:
    """Returns the command of a race."""
    return [sys.executable, "-m", "launch", "compare", *options, "--budget", budget, "--output-dir", str(place)]


def race(options: Sequence[str], budget: str, place: Path) -> Taken:
    """Plans a race and makes it.

    Raises:
        Refused: It cannot take place, or failed.
    """
    command = command_of(options, budget, place)
    environment = {**command_environment(), "PYTHONPATH": str(PROJECT_DIRECTORY)}
    dry = subprocess.run(
        [*command, "--dry-run"], cwd=PROJECT_DIRECTORY, env=environment, capture_output=True, text=True
    )
    planned = seconds_in(dry.stdout)
    if dry.returncode or planned is None:
        raise Refused((dry.stderr.strip().splitlines() or ["it says no duration"])[-1])
    began, first = time.monotonic(), None
    with subprocess.Popen(
        command, cwd=PROJECT_DIRECTORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if first is None and line.rstrip().endswith(" left") and (left := seconds_in(line)) is not None:
                first = time.monotonic() - began + left
    if process.returncode:
        raise Refused(f"it ended with exit code {process.returncode}")
    return Taken(planned, first, time.monotonic() - began)


def main(arguments: Sequence[str]) -> None:
    """Makes a race of each kind, and prints a row for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.estimates", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the races are kept")
    parser.add_argument("--budget", default="3min", help="of each race (default: 3min)")
    asked = parser.parse_args(arguments)
    places = {kind: asked.directory.absolute() / kind.replace(" ", "-") for kind in KINDS}
    for place in places.values():
        if place.exists():
            parser.error(f"{place}: is there already; name another directory")
    print(f"| {' | '.join(_HEADINGS)} |\n| {' | '.join(['---'] * len(_HEADINGS))} |", flush=True)
    for kind, options in KINDS.items():
        try:
            cells = race(options, asked.budget, places[kind]).cells()
        except Refused as refusal:
            cells = [f"refused: {refusal}", *[""] * (len(_HEADINGS) - 2)]
        print(f"| {' | '.join([kind, *cells])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
