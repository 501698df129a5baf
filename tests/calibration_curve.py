"""The smallest difference that a race finds, against its budget: ``python -m tests.calibration_curve DIRECTORY``.

For one and two ranks, races as those of tests/calibration.py have budgets from one minute to twenty. What was seen goes
to calibration-curve.json in the directory, race by race; the command goes on from there, and prints the curve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from records.files import write_atomically
from tests.calibration import RaceSeen, make_race, race_options

BUDGETS = ("1min", "2min", "5min", "10min", "20min")
_PLANTED = 0.03


class Point(BaseModel):
    """One race of the curve.

    Attributes:
        num_processes: The number of ranks of each entrant.
        budget: Its budget.
        race: What was seen; None where the budget is too small for such a race.
    """

    model_config = ConfigDict(extra="forbid")

    num_processes: int
    budget: str
    race: RaceSeen | None


class Curve(BaseModel):
    """All races of the curve, and the command of each, with other numbers of ranks and budgets."""

    model_config = ConfigDict(extra="forbid")

    command: str
    points: list[Point]


def main(arguments: Sequence[str]) -> None:
    """Makes the races that are missing, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration_curve", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the races and their results are kept")
    asked = parser.parse_args(arguments)
    directory = asked.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "calibration-curve.json"
    command = f"launch/run.sh compare {' '.join(race_options(2, BUDGETS[-1], _PLANTED))}"
    curve = Curve(command=command, points=[])
    if target.exists():
        curve = Curve.model_validate_json(target.read_bytes())
    for budget in BUDGETS:
        for num_processes in (2, 1):
            if not any((one.num_processes, one.budget) == (num_processes, budget) for one in curve.points):
                place = directory / f"{num_processes}-{budget}"
                race = make_race(place, race_options(num_processes, budget, _PLANTED))
                curve.points.append(Point(num_processes=num_processes, budget=budget, race=race))
                write_atomically(target, curve.model_dump_json() + "\n")
    print("ranks | budget | took (s) | smallest difference found (%) | against itself (%) | with a planted 3 % (%)")
    for one in curve.points:
        print(f"{one.num_processes} | {one.budget} | {_line(one.race)}")


def _line(race: RaceSeen | None) -> str:
    if race is None:
        return "too small a budget | | |"
    comparisons = race.comparisons()
    detectable = max(one.detectable for one in comparisons.values() if one.detectable is not None)
    seen = [comparisons[pair].slowdown for pair in ("ddp same", "ddp slowed")]
    shown = [f"{one.estimate:.1%} [{one.low:.1%}, {one.high:.1%}]" if one else "" for one in seen]
    return " | ".join([f"{race.seconds:.0f}", f"{detectable:.1%}", *shown])


if __name__ == "__main__":
    main(sys.argv[1:])
