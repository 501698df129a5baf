"""How the budget of a race is spent: on starts of entrants, and on steps of each start."""

from __future__ import annotations

from statistics import median

from compare.race.collectives import seconds_of_collectives
from compare.race.costs import Costs
from compare.race.heat import SECONDS_OF_A_TURN, steps_of_a_turn
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, Schedule, draw_plan, heats_of
from compare.results import MIN_PAIRS, SETTLED_STARTS
from launch.errors import UsageError
from launch.quantities import format_duration
from records.throughput import NUM_WARMUP_STEPS

# A race that ends as soon as it knows enough finds that out between its starts.
_MOST_STARTS_UNTIL_KNOWN = 40
# In a start, turns take about so many times as long as starting did, or more.
_TURNS_PER_START = 2.0
# A start has at least so many turns, however long they are, and measures at least as long as so many short ones take.
_FEWEST_TURNS = 5
_FEWEST_SHORT_TURNS = 45


def make_schedule(entrants: list[Entrant], options: RaceOptions, costs: Costs, *, seconds_of_tuning: float) -> Schedule:
    """Spends the budget of a race.

    Args:
        entrants: Who takes part.
        options: What the user asks of the race.
        costs: What was measured on this machine.
        seconds_of_tuning: What finding out how to tune them takes.

    Raises:
        UsageError: The budget is too small.
    """
    once = draw_plan(entrants, options, repeats=1, costs=costs)
    fixed = seconds_of_tuning + sum(costs.alone(run, options) for run in once if run.purpose != "timed")
    fixed += seconds_of_collectives(entrants, options)
    heats = [[run.entrant for run in heat] for heat in heats_of(once) if heat[0].purpose == "timed"]
    of_a_start = sum(costs.start(heat) + costs.end(heat) for heat in heats)
    of_a_step = sum(costs.turns(heat, 1) for heat in heats)
    fewest = NUM_WARMUP_STEPS + max(_fewest_steps([costs.step(who) for who in heat]) for heat in heats)
    repeats = options.repeats or 0
    limit = SETTLED_STARTS if options.until is None else _MOST_STARTS_UNTIL_KNOWN
    if options.timed_steps is not None:
        steps = options.timed_steps
        repeats = repeats or MIN_PAIRS
    else:
        left = options.budget - fixed
        most = min(round(left / ((1 + _TURNS_PER_START) * of_a_start)), int(left / (of_a_start + fewest * of_a_step)))
        repeats = repeats or max(MIN_PAIRS, min(limit, most))
        steps = int((left / repeats - of_a_start) / of_a_step)
        if steps < fewest and "budget" not in options.model_fields_set:
            steps = fewest  # a race without options refuses no machine, however slow
        if steps < fewest:
            needed = fixed + repeats * (of_a_start + fewest * of_a_step)
            raise UsageError(
                f"--budget {format_duration(options.budget)}: {len(entrants)} entrants, each started {repeats} times, "
                f"need about {format_duration(needed)}; give more, or ask for fewer entrants"
            )
    seconds = fixed + repeats * (of_a_start + steps * of_a_step)
    # If starts take less time than expected, there are more of them.
    is_planned = options.repeats is None and options.timed_steps is None
    return Schedule(
        repeats=repeats,
        most_repeats=max(2 * repeats, limit) if is_planned else repeats,
        timed_steps=steps,
        seconds=seconds,
    )


def _fewest_steps(step_seconds: list[float]) -> int:
    """Returns how many steps a start has to take, beside those of its warm-up."""
    of_a_turn = sum(steps_of_a_turn(step_seconds))
    return max(_FEWEST_TURNS * of_a_turn, round(_FEWEST_SHORT_TURNS * SECONDS_OF_A_TURN / median(step_seconds)))
