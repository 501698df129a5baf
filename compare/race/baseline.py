"""A race that is compared with an earlier one: it takes the same starts and steps, and is checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from compare.race.options import RaceOptions
from compare.race.plan import Entrant
from compare.report.baseline import Baseline, differences_before
from compare.results import MIN_PAIRS
from launch.errors import UsageError
from launch.options import validated
from records.config import RunConfig


def like_baseline(options: RaceOptions, baseline: Baseline) -> RaceOptions:
    """Gives a race as many starts and steps as the baseline had, unless the user asks for other numbers.

    The time of a step depends on its batch, and so does the mean over some steps: only the same steps are comparable.

    Raises:
        UsageError: The user asks for too few starts, or for other steps.
    """
    settled = {"repeats": options.repeats or baseline.num_starts, "timed_steps": options.timed_steps}
    if settled["repeats"] < MIN_PAIRS:
        raise UsageError(
            f"--repeats {options.repeats}: does not tell how much starts differ, which a comparison with a baseline "
            f"needs to know; give {MIN_PAIRS} or more"
        )
    if baseline.num_steps is not None and options.timed_steps is None:
        settled["timed_steps"] = baseline.num_steps
    return validated(RaceOptions, {**options.model_dump(), **settled})


def check_baseline(baseline: Baseline, options: RaceOptions, configs: Mapping[Entrant, RunConfig]) -> list[str]:
    """Checks, before a race begins, that its results can be compared with a baseline.

    Args:
        baseline: The baseline.
        options: The options of the race.
        configs: The configuration of a timed run of each entrant.

    Raises:
        UsageError: They cannot; the text says why.
    """
