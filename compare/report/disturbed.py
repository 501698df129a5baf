"""Starts of a race that other programs disturbed; they are left out where enough others remain.

Whether a start is left out depends on what other programs took of the cores, never on what was measured. All entrants
that took turns in it are left out together, so that none of them is favoured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from compare.numbers import points
from compare.report.parts import block_of
from compare.report.runs import Run
from compare.results import DISTURBED_SHARE, MIN_PAIRS


def without_disturbed(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Leaves out disturbed starts.

    Args:
        runs: The runs, of which those that took no turns remain.

    Returns:
        The runs that remain, in their order, and a sentence about each start that does not.
    """
    # By race and conditions, and then by block.
    starts: dict[tuple[object, ...], dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.race is not None and run.race.turns:
            race, _, *conditions = block_of(run)
            starts[(race, *conditions)][run.race.block].append(run)
    left_out: set[str] = set()
    sentences = []
    for by_block in starts.values():
        shares = {block: _foreign_share(together) for block, together in by_block.items()}
        disturbed = [block for block, share in shares.items() if share > DISTURBED_SHARE]
        if len(shares) - len(disturbed) < MIN_PAIRS:
            continue
        for block in disturbed:
            left_out |= {run.name for run in by_block[block]}
            config, *_ = (run.record.config for run in by_block[block])
            sentences.append(
                f"start {block} of those with {config.precision} and {config.global_batch_size} samples a step is left "
                f"out: other programs took {points(shares[block])} % of the cores meanwhile"
            )
    return [run for run in runs if run.name not in left_out], sentences


def _foreign_share(together: Sequence[Run]) -> float:
    """Returns what other programs took while the entrants of a start took turns, as a mean."""
    shares = [turn.foreign_share for run in together if run.race for turn in run.race.turns if turn.round > 0]
    return fmean(shares) if shares else 0.0
