"""A race that is compared with an earlier one: it has as many starts and steps, and is checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from compare.race.options import RaceOptions
from compare.race.plan import Entrant
from compare.report.baseline import ALLOW, Baseline, differences_before
from launch.errors import UsageError
from records.config import RunConfig


def like_baseline(options: RaceOptions, baseline: Baseline) -> RaceOptions:
    """Gives a race as many starts and steps as the baseline had, unless the user asks for other numbers.

    The time of a step depends on its batch, and so does the mean over some steps: only the same steps are comparable.

    Raises:
        UsageError: The race would not find out whether its entrants are still in lockstep.
    """
    if not options.diagnosis:
        raise UsageError(
            "--no-diagnosis: --baseline also asks whether all still compute the same, which diagnosis runs show; "
            "leave out one of the two"
        )
    return options.model_copy(
        update={
            "repeats": options.repeats or baseline.num_starts,
            "timed_steps": options.timed_steps or baseline.num_steps,
        }
    )


def check_baseline(
    baseline: Baseline, options: RaceOptions, configs: Mapping[Entrant, RunConfig], terminal: Console
) -> None:
    """Checks, before a race begins, that its results can be compared with a baseline, and says where that is allowed.

    Args:
        baseline: The baseline.
        options: The options of the race.
        configs: The configuration of a timed run of each entrant.
        terminal: Shows in what the baseline differs, if the user allows that.

    Raises:
        UsageError: They cannot; the text says why.
    """
    planned = [(entrant.name, entrant.own_settings, config) for entrant, config in configs.items()]
    # What tuning finds takes part, too, and is not known yet.
    networks = {number: text for number in options.num_processes if (text := options.network.described(number))}
    differences = differences_before(
        baseline, planned, networks, num_steps=options.timed_steps, is_complete=not options.tune
    )
    baseline.refuse(differences)
    for difference in differences:
        terminal.print(f"baseline: {difference} ({ALLOW})")
