"""Which positions of a backend's few knobs make it fastest here: the entrants that ``compare --tune`` adds.

One knob after the other is turned: its positions take turns with the best that was found so far, on the same steps.
What is found this way is measured again in the race itself, beside the backend as it comes, since the fastest of
several is partly the luckiest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.registry import find_backend
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.heat import run_heat
from compare.race.own_entrants import read_own_entrant
from compare.race.plan import Entrant, PlannedRun, RacePlan, Schedule
from compare.report.reading import read_run
from launch.guardian import scratch_directory

# A difference that so short a time does not show is not worth a setting.
_SECONDS_OF_A_POSITION = 8.0
_FEWEST_STEPS = 30


def can_be_tuned(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Returns the entrants that `tuned_entrants` tries to make faster: those that communicate and have knobs."""
    return [
        entrant
        for entrant in entrants
        if entrant.num_processes > 1 and not entrant.variant and find_backend(entrant.backend).knobs
    ]


def seconds_of_tuning(entrants: Sequence[Entrant], costs: Costs) -> float:
    """Returns how long `tuned_entrants` is expected to take."""
    first = {entrant.backend: entrant for entrant in reversed(can_be_tuned(entrants))}
    return sum(
        costs.start(positions) + costs.turns(positions, _steps(entrant, costs)) + costs.end(positions)
        for entrant in first.values()
        for knob in find_backend(entrant.backend).knobs
        if (positions := [entrant] * (len(knob) + 1))
    )


def tuned_entrants(plan: RacePlan, costs: Costs, say: Callable[[str], None]) -> list[Entrant]:
    """Tunes each backend under the first conditions of the race.

    Args:
        plan: The plan of the race.
        costs: What was measured on this machine.
        say: Is told what is being tried, and what was found.

    Returns:
        For each entrant whose backend became faster, the same with what was found.
    """
    able = can_be_tuned(plan.entrants)
    found: dict[str, Entrant] = {}
    for entrant in able:
        if entrant.backend in found:
            continue
        best, knobs = entrant, find_backend(entrant.backend).knobs
        for number, knob in enumerate(knobs, start=1):
            say(f"tuning {entrant.backend}: knob {number} of {len(knobs)}, {len(knob) + 1} positions")
            best = _fastest(plan, [best, *(_turned(best, position) for position in knob)], _steps(entrant, costs))
        say(f"tuned {entrant.backend}: {best.variant or 'nothing is faster than its defaults'}")
        found[entrant.backend] = best
    return [
        entrant.model_copy(
            update={"variant": f"tuned: {best.variant}", "options": best.options, "variables": best.variables}
        )
        for entrant in able
        if (best := found[entrant.backend]).variant
    ]


def _steps(entrant: Entrant, costs: Costs) -> int:
    return max(_FEWEST_STEPS, round(_SECONDS_OF_A_POSITION / costs.step(entrant)))


def _turned(best: Entrant, position: str) -> Entrant:
    own = read_own_entrant(f"{best.backend}:{position}")
    return best.model_copy(
        update={
            "variant": " ".join(filter(None, (best.variant, position))),
            "options": (*best.options, *own.options),
            "variables": (*best.variables, *own.variables),
        }
    )


def _fastest(plan: RacePlan, positions: Sequence[Entrant], steps: int) -> Entrant:
    """Returns the position whose steps took the least time together; the first one if none came to the end."""
    tried = plan.model_copy(update={"schedule": Schedule(repeats=1, most_repeats=1, timed_steps=steps, seconds=0.0)})
    runs = [
        PlannedRun(entrant=entrant, purpose="timed", block=1, position=position)
        for position, entrant in enumerate(positions)
    ]
    with scratch_directory("lockstep-tuning-") as place:
        directory = RaceDirectory(place)
        directory.record(runs[0]).parent.mkdir()
        run_heat(tried, runs, directory, {}, None)
        seconds = {
            run.entrant: sum(sum(span.seconds) for span in read_run(directory.record(run)).timed_steps)
            for run in runs
            if directory.is_finished(run)
        }
    return min(seconds, key=lambda entrant: seconds[entrant], default=positions[0])
