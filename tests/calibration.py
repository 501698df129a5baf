"""Real races whose outcome is known: ``python -m tests.calibration DIRECTORY``.

In each race DDP meets the same again, and DDP that waits after each step for a share of it. A race that can be trusted
claims no difference between the first two, and finds the planted one. The races are separate: each has starts of its
own. Their turns go to a file in the directory, race by race. A campaign of forty races takes hours, so it goes on from
that file whenever the command is repeated, on any machine; each race says where it took place, and when. What others
made, in docs/results, is left alone; a copy of it in the directory is gone on with.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from compare.race.directory import RaceDirectory
from compare.report.disturbed import leave_out_disturbed
from compare.report.grouping import EntrantRuns, group_runs
from compare.report.machines import located
from compare.report.pairing import paired
from compare.report.reading import read_inputs
from compare.report.statistics import PairedStarts, compare_group
from compare.report.words import machine_of, software_of
from compare.results import Claim, Comparison
from launch.starters.environment import command_environment
from launch.starters.interface import PROJECT_DIRECTORY
from records.files import write_atomically
from tests.steadiness import cores_are_steady

_SAME, _SLOWED = "tests.variants_of_ddp:SameDDP", "tests.variants_of_ddp:SlowedDDP"
_SECONDS_BETWEEN_LOOKS = 30.0


class RaceSeen(BaseModel):
    """One race of a campaign.

    Attributes:
        date: The day on which it began.
        machine: Where it took place, in words.
        software: The versions and the commit, in words.
        seconds: How long the whole command took.
        foreign_share: The share of the cores that other programs took during its turns, as a mean.
        starts: For each pair of entrants, as in `PairedStarts`, the logarithms of the ratios of their times.
    """

    model_config = ConfigDict(extra="forbid")

    date: str
    machine: str
    software: str
    seconds: float
    foreign_share: float
    starts: dict[str, list[list[float]]]

    def comparisons(self) -> dict[str, Comparison]:
        """Returns what the race says of each pair, by `first second`."""
        pairs = [PairedStarts(*pair.split(), starts) for pair, starts in self.starts.items()]
        return {f"{one.first} {one.second}": one for one in compare_group(pairs)}

    def judged(self) -> dict[str, Claim]:
        """Returns what the race claims of each pair."""
        return {pair: comparison.claim for pair, comparison in self.comparisons().items()}


class Campaign(BaseModel):
    """Separate races under the same conditions.

    Attributes:
        command: The command of each race.
        planted: By what share the steps of the slowed entrant are longer, at least.
        races: The races.
    """

    model_config = ConfigDict(extra="forbid")

    command: str
    planted: float
    races: list[RaceSeen]


class _Plan(NamedTuple):
    directory: Path
    arguments: list[str]
    num_races: int
    planted: float
    target: Path
    waits_for_steady_cores: bool


def main(arguments: Sequence[str]) -> int:
    """Races as often as asked, and writes what was seen; returns the exit code."""
    plan = _read(arguments)
    campaign = Campaign(command=f"launch/run.sh compare {' '.join(plan.arguments)}", planted=plan.planted, races=[])
    if plan.target.exists():
        earlier = Campaign.model_validate_json(plan.target.read_bytes())
        if (earlier.command, earlier.planted) != (campaign.command, campaign.planted):
            sys.exit(f"{plan.target} holds a campaign of other races ({earlier.command}); move it away")
        campaign = earlier
    for number in range(len(campaign.races) + 1, plan.num_races + 1):
        while plan.waits_for_steady_cores and not cores_are_steady():
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        race = make_race(plan.directory / f"race-{number:02d}", [*plan.arguments, "--order-seed", str(number)])
        if race is None:
            return 1
        campaign.races.append(race)
        write_atomically(plan.target, json.dumps(campaign.model_dump(), indent=None) + "\n")
        print(f"{number}/{plan.num_races}: {campaign.races[-1].judged()}", flush=True)
    print(f"{plan.target}: {summary(campaign)}")
    return 0


def _read(arguments: Sequence[str]) -> _Plan:
    parser = argparse.ArgumentParser(prog="python -m tests.calibration", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the races and their results are kept")
    parser.add_argument("--races", type=int, default=40, help="how many races there shall be in the end (default: 40)")
    parser.add_argument("--budget", default="5min", help="of each race (default: 5min)")
    parser.add_argument("--num-processes", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--planted", type=float, default=3.0, help="slowdown in percent (default: 3)")
    parser.add_argument("--steady", action="store_true", help="begin a race only when cores are steady")
    asked = parser.parse_args(arguments)
    if asked.races < 1:
        parser.error(f"--races {asked.races}: there must be at least one")
    race = race_options(asked.num_processes, asked.budget, asked.planted / 100)
    name = f"calibration-{asked.num_processes}-ranks-{asked.planted:g}-percent-{asked.budget}"
    directory = asked.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return _Plan(directory, race, asked.races, asked.planted / 100, directory / f"{name}.json", asked.steady)


def race_options(num_processes: int, budget: str, planted: float) -> list[str]:
    """Returns the options of a race between DDP, the same again, and DDP slowed by a share of its steps.

    A single rank has one thread, as each of two has: starts of a rank with several threads differ.
    """
    threads = ["--threads-per-rank", "1"] if num_processes == 1 else []
    return [
        *("--backends", f"ddp,{_SAME}", "--entrant", f"slowed={_SLOWED}:--planted-slowdown={planted}"),
        *("--num-processes", str(num_processes), "--budget", budget, "--no-limits", "--no-collectives"),
        "--no-diagnosis",
        *threads,
    ]


def make_race(directory: Path, options: Sequence[str]) -> RaceSeen | None:
    """Makes a race in a directory of its own; returns what was seen, None if it was refused.

    Raises:
        SystemExit: It failed, or was interrupted.
    """
    shutil.rmtree(directory, ignore_errors=True)  # a race that was interrupted: its time would not be known
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "launch", "compare", *options, "--output-dir", str(directory)],
        cwd=PROJECT_DIRECTORY,
        env={**command_environment(), "PYTHONPATH": str(PROJECT_DIRECTORY)},
        stdout=subprocess.DEVNULL,
    )
    if done.returncode not in (0, 2):
        sys.exit(f"{directory}: the race ended with exit code {done.returncode}")
    return None if done.returncode else _seen(directory, time.monotonic() - begin)


def _seen(directory: Path, seconds: float) -> RaceSeen:
    """Reads the turns of a race that is over."""
    runs = located(read_inputs(RaceDirectory(directory).records()).runs)
    (group,) = [entrants for entrants in group_runs(runs) if len(entrants) == 3]
    leave_out_disturbed([group])
    shares = [turn.foreign_share for run in runs if run.race for turn in run.race.turns]
    starts = {
        f"{_short(first)} {_short(second)}": [
            [round(value, 5) for value in turns] for turns in paired(first, second).starts
        ]
        for first, second in combinations(sorted(group, key=_short), 2)
    }
    record = group[0].timed[0].record
    return RaceSeen(
        date=time.strftime("%Y-%m-%d", time.gmtime(record.config.started_at)),
        machine=machine_of(record),
        software=software_of(record),
        seconds=round(seconds, 1),
        foreign_share=round(sum(shares) / len(shares), 4),
        starts=starts,
    )


def _short(entrant: EntrantRuns) -> str:
    return {_SAME: "same", _SLOWED: "slowed"}.get(entrant.backend, entrant.backend)


def summary(campaign: Campaign) -> str:
    """Says in how many races a difference was claimed."""
    judged = [race.judged() for race in campaign.races]
    wrong = sum(one["ddp same"] != "none" for one in judged)
    found = sum(one["ddp slowed"] == "slower" for one in judged)
    return (
        f"of {len(judged)} races, {wrong} claim a difference between DDP and itself, "
        f"and {found} find the planted {100 * campaign.planted:g} %; "
        f"races on {', '.join(sorted({race.machine for race in campaign.races}))}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
