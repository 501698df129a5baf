"""How long the turns of a race should be: ``python -m tests.turn_lengths DIRECTORY``.

DDP races against itself, three times over, with turns of several lengths. For each length this prints how much turns
differ, and the standard error that they would leave if a race spent five minutes on them.
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

import numpy as np

from compare.race import command, heat
from compare.race.directory import RaceDirectory
from compare.report.grouping import group_runs
from compare.report.machines import located
from compare.report.pairing import paired
from compare.report.reading import read_inputs

# Seconds of the timed steps of a turn, and of what comes before them.
LENGTHS = ((0.2, 0.04), (0.07, 0.02), (0.045, 0.02), (0.02, 0.02))
_FEWEST_STEPS = {0.045: 2, 0.02: 1}
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
    parser.add_argument("--timed-steps", type=int, default=250, help="steps of each of three starts (default: 250)")
    asked = parser.parse_args(arguments)
    seen: dict[float, list[tuple[float, float, float]]] = {seconds: [] for seconds, _ in LENGTHS}
    for number in range(asked.rounds):
        for seconds, before in LENGTHS:
            place = asked.directory / f"{seconds:g}-{number}"
            seen[seconds].append(_race(seconds, before, place, asked.timed_steps))
    print("seconds of a turn | turns differ by (%) | seconds of a round | error in five minutes (%)")
    for seconds, races in seen.items():
        spread, of_a_round, error = (statistics.mean(values) for values in zip(*races, strict=True))
        print(f"{seconds:g} | {spread:.1%} | {of_a_round:.2f} | {error:.2%}")


def _race(seconds: float, before: float, place: Path, timed_steps: int) -> tuple[float, float, float]:
    """Races once; returns how much turns of a pair differ, how long a round takes, and the error in five minutes."""
    heat.SECONDS_OF_A_TURN, heat._SECONDS_TO_WARM_UP = seconds, before
    heat._FEWEST_TIMED_STEPS = _FEWEST_STEPS.get(seconds, 3)
    spent: list[float] = []
    original = heat._take_turns

    def timed(*given: object) -> None:
        began = time.monotonic()
        original(*given)  # type: ignore[arg-type]
        spent.append(time.monotonic() - began)

    heat._take_turns = timed  # type: ignore[assignment]
    try:
        options = [*_ENTRANTS, "--num-processes=2", "--repeats=3", f"--timed-steps={timed_steps}"]
        options += ["--no-limits", "--no-collectives", "--no-diagnosis", f"--output-dir={place}"]
        assert command.run(options) == 0
    finally:
        heat._take_turns = original
    runs = located(read_inputs(RaceDirectory(place).records()).runs)
    (group,) = group_runs(runs)
    turns = [one for first, second in combinations(group, 2) for one in paired(first, second).starts]
    spread = math.sqrt(statistics.mean(float(np.var(one, ddof=1)) for one in turns))
    of_a_round = sum(spent) / sum(len(run.race.turns) for run in group[0].timed if run.race)
    return spread, of_a_round, spread * math.sqrt(of_a_round / _SECONDS_OF_A_RACE)


if __name__ == "__main__":
    main(sys.argv[1:])
