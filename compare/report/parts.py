"""Blocks of a race whose entrants did not fit into memory together, and took turns in several parts.

All parts take the same turns, and one entrant takes part in each of them. What the machine did differently during a
later part is what this entrant took longer there than in the first part, turn by turn; the times of the others are
divided by it. So all times are as if all had raced in the first part, with the noise of the shared entrant added.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

from compare.report.runs import Run, TurnFacts
from compare.report.statistics import log_ratio


def as_one_part(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with times as if those of a block had all raced in one part.

    Args:
        runs: The runs, of which those that took no turns are returned as they are.

    Returns:
        The runs in their order, without the repeated ones of an entrant that took part in several parts.
    """
    parts: dict[tuple[object, ...], dict[tuple[str, int], Run]] = defaultdict(dict)
    for run in runs:
        if run.race is not None and run.race.turns:
            parts[block_of(run)][_who(run), run.race.heat] = run
    found = []
    for run in runs:
        if run.race is None or not run.race.turns or run.race.heat == 0:
            found.append(run)
            continue
        block, heat = parts[block_of(run)], run.race.heat
        shared = next((who for who, part in block if part == heat and (who, 0) in block), None)
        if shared is None:  # it failed in one of the two, and nothing can be said of the difference between them
            found.append(run)
        elif shared != _who(run):
            found.append(_corrected(run, block[shared, 0], block[shared, heat]))
    return found


def block_of(run: Run) -> tuple[object, ...]:
    """Returns what runs have in common that took turns in one block: their race, its number, and the conditions."""
    assert run.race is not None
    config = run.record.config
    conditions = (config.precision, run.record.gradient_accumulation_steps, config.global_batch_size)
    return run.race.race, run.race.block, *conditions


def _who(run: Run) -> str:
    return f"{run.entrant}, {run.record.config.num_processes}"


def _corrected(run: Run, first: Run, later: Run) -> Run:
    """Divides the times of each turn by what the shared entrant took longer in this part than in the first.

    Args:
        run: A run in a later part.
        first: The shared entrant in the first part.
        later: The shared entrant in the same part as `run`.
    """
    assert run.race is not None
    then, now = _turns(first), _turns(later)
    turns = [
        turn.model_copy(update={"step_seconds": [second * drift for second in turn.step_seconds]})
        for turn in run.race.turns
        if turn.first_step in then and turn.first_step in now
        for drift in [math.exp(log_ratio(now[turn.first_step].step_seconds, then[turn.first_step].step_seconds))]
    ]
    return dataclasses.replace(run, race=run.race.model_copy(update={"turns": turns, "heat": 0}))


def _turns(run: Run) -> dict[int, TurnFacts]:
    assert run.race is not None
    return {turn.first_step: turn for turn in run.race.turns}
