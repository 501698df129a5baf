"""How long the turns of a race should be: ``python -m tests.turn_lengths DIRECTORY``.

DDP races against itself, three times over, with turns of several lengths. For each length this prints the standard
error of a difference that they would leave if a race spent five minutes on them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from compare.race import command, heat
from compare.race.directory import RaceDirectory
from compare.report.grouping import group_runs
from compare.report.machines import located
from compare.report.pairing import paired
from compare.report.reading import read_inputs
from compare.report.statistics import compare_group

# Seconds of the timed steps of a turn, and of what comes before them; and the fewest timed steps.
LENGTHS = ((0.07, 0.02, 3), (0.07, 0.01, 3), (0.045, 0.01, 2), (0.02, 0.01, 1))
_SECONDS_OF_A_RACE = 300.0
_ENTRANTS = (
    "--backends=ddp,tests.variants_of_ddp:SameDDP",
    "--entrant=third=tests.variants_of_ddp:SlowedDDP:--planted-slowdown=0",
)


def main(arguments: Sequence[str]) -> None:
    """Races, and prints a line for each length."""
    parser = argparse.ArgumentParser(prog="python -m tests.turn_lengths", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the races are kept")
    parser.add_argument("--rounds", type=int, default=2, help="how often each length races (default: 2)")
    parser.add_argument("--num-processes", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--timed-steps", type=int, default=250, help="steps of each of three starts (default: 250)")
    asked = parser.parse_args(arguments)
    seen: dict[tuple[float, float, int], list[_Seen]] = {length: [] for length in LENGTHS}
    for number in range(asked.rounds):
        for position, length in enumerate(LENGTHS):
            options = [f"--num-processes={asked.num_processes}", f"--timed-steps={asked.timed_steps}"]
            seen[length].append(_race(length, options, asked.directory / f"{position}-{number}"))
    print("seconds before | timed seconds | seconds of a round | error in five minutes (%)")
    for (seconds, before, _), races in seen.items():
        of_a_round, error = (statistics.mean(values) for values in zip(*races, strict=True))
        print(f"{before:g} | {seconds:g} | {of_a_round:.2f} | {error:.2%}")


class _Seen(NamedTuple):
    """What a race with turns of one length shows.

    Attributes:
        of_a_round: The seconds of a round.
        error: The standard error of the logarithm of a ratio, were five minutes spent on turns.
    """

    of_a_round: float
    error: float


def _race(length: tuple[float, float, int], options: list[str], place: Path) -> _Seen:
    heat.SECONDS_OF_A_TURN, heat._SECONDS_TO_WARM_UP, heat._FEWEST_TIMED_STEPS = length
    spent: list[float] = []
    original = heat._take_turns

    def timed(*given: object) -> None:
        began = time.monotonic()
        original(*given)  # type: ignore[arg-type]
        spent.append(time.monotonic() - began)

    heat._take_turns = timed  # type: ignore[assignment]
    try:
        options = [*_ENTRANTS, *options, "--threads-per-rank=1", "--repeats=3", f"--output-dir={place}"]
        assert command.run([*options, "--no-limits", "--no-collectives", "--no-diagnosis"]) == 0
    finally:
        heat._take_turns = original
    runs = located(read_inputs(RaceDirectory(place).records()).runs)
    (group,) = [entrants for entrants in group_runs(runs) if len(entrants) == 3]
    spreads = [one.spread for one in compare_group([paired(*pair) for pair in combinations(group, 2)])]
    # The mean of a start is known so well because of its turns, which took a mean of the seconds spent.
    of_a_start = statistics.mean(one.turns**2 for one in spreads if one)
    of_a_round = sum(spent) / sum(len(run.race.turns) for run in group[0].timed if run.race)
    return _Seen(of_a_round, math.sqrt(of_a_start * statistics.mean(spent) / _SECONDS_OF_A_RACE))


if __name__ == "__main__":
    main(sys.argv[1:])
