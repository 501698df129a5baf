"""Which positions of a backend's few knobs make it fastest here: the entrants that ``compare --tune`` adds.

One knob after the other is turned: its positions take turns with the best that was found so far, on the same steps.
What is found this way is measured again in the race itself, beside the backend as it comes, since the fastest of
several is partly the luckiest. Positions that cannot start here are left out. Those that do not fit into memory
together take turns in parts, as entrants of a race do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from backends.capabilities import UnsupportedError
from backends.registry import find_backend
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.heat import run_heat
from compare.race.own_entrants import read_own_entrant
from compare.race.plan import Entrant, PlannedRun, RacePlan, Schedule
from compare.race.resolving import resolve_run
from compare.report.reading import read_run
from compare.report.runs import Run
from launch.errors import UsageError, one_line
from launch.guardian import scratch_directory

# The variant of an entrant that has the settings which were found.
_TUNED = "tuned"
# A difference that so short a time does not show is not worth a setting.
_SECONDS_OF_A_POSITION = 8.0
_FEWEST_STEPS = 30


def can_be_tuned(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Returns the entrants that `tuned_entrants` tries to make faster: backends that communicate and have knobs."""
    return [
        entrant
        for entrant in entrants
        if entrant.role == "backend"
        and not entrant.variant
        and entrant.num_processes > 1
        and find_backend(entrant.backend).knobs
    ]


def possible_entrants(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Returns what `tuned_entrants` adds at most, still without the settings, which do not change the names."""
    return [entrant.model_copy(update={"variant": _TUNED}) for entrant in can_be_tuned(entrants)]


def seconds_of_tuning(plan: RacePlan, costs: Costs) -> float:
    """Returns how long `tuned_entrants` is expected to take."""
    first = {entrant.backend: entrant for entrant in reversed(can_be_tuned(plan.entrants))}
    return sum(
        costs.start(part) + costs.turns(part, _steps(entrant, costs)) + costs.end(part)
        for entrant in first.values()
        for knob in _knobs(plan, entrant, lambda text: None)
        for part in _parts(_positions(entrant, knob), costs)
    )


def tuned_entrants(plan: RacePlan, costs: Costs, say: Callable[[str], None]) -> list[Entrant]:
    """Tunes each backend under the first conditions of the race.

    Args:
        plan: The plan of the race.
        costs: What was measured on this machine.
        say: Is told what cannot run here, what is being tried, what failed, and what was found.

    Returns:
        For each entrant whose backend became faster, the same with the settings that were found.
    """
    able = can_be_tuned(plan.entrants)
    found: dict[str, Entrant] = {}
    for entrant in able:
        if entrant.backend in found:
            continue
        best, knobs = entrant, _knobs(plan, entrant, say)
        nothing = "all that was tried failed" if knobs else "nothing that could be tried starts here"
        for number, knob in enumerate(knobs, start=1):
            say(f"tuning {entrant.backend}: knob {number} of {len(knobs)}, {len(knob) + 1} positions")
            fastest = _fastest(plan, _positions(best, knob), _steps(entrant, costs), costs, say)
            if fastest is not None:
                best, nothing = fastest, "nothing is faster than its defaults"
        say(f"tuned {entrant.backend}: {best.variant or nothing}")
        found[entrant.backend] = best
    return [
        entrant.model_copy(update={"variant": _TUNED, "options": best.options, "variables": best.variables})
        for entrant in able
        if (best := found[entrant.backend]).variant
    ]


def _knobs(plan: RacePlan, entrant: Entrant, say: Callable[[str], None]) -> list[list[str]]:
    """Returns the positions of each knob of a backend, without those that cannot run here."""
    knobs = [
        [position for position in knob if _can_run(plan, _turned(entrant, position), say)]
        for knob in find_backend(entrant.backend).knobs
    ]
    return [knob for knob in knobs if knob]


def _can_run(plan: RacePlan, turned: Entrant, say: Callable[[str], None]) -> bool:
    """Whether a position can start here; if it cannot, says why."""
    try:
        resolve_run(plan, PlannedRun(entrant=turned, purpose="timed", block=1, position=0))
    except (UnsupportedError, UsageError) as error:
        say(f"tuning {turned.backend}: {turned.variant} is left out: {one_line(error)}")
        return False
    return True


def _steps(entrant: Entrant, costs: Costs) -> int:
    return max(_FEWEST_STEPS, round(_SECONDS_OF_A_POSITION / costs.step(entrant)))


def _positions(best: Entrant, knob: Sequence[str]) -> list[Entrant]:
    """Returns the best one so far, and what each position of a knob makes of it."""
    return [best, *(_turned(best, position) for position in knob)]


def _parts(positions: list[Entrant], costs: Costs) -> list[list[Entrant]]:
    """Divides positions into parts that fit into memory together, all with the first one."""
    return costs.parts(positions, shared=positions[0])


def _turned(best: Entrant, position: str) -> Entrant:
    own = read_own_entrant(f"{best.backend}:{position}")
    return best.model_copy(
        update={
            "variant": " ".join(filter(None, (best.variant, position))),
            "options": (*best.options, *own.options),
            "variables": (*best.variables, *own.variables),
        }
    )


def _fastest(
    plan: RacePlan, positions: list[Entrant], steps: int, costs: Costs, say: Callable[[str], None]
) -> Entrant | None:
    """Returns the position whose steps took the least time together; None if none came to the end."""
    tried = plan.model_copy(update={"schedule": Schedule(repeats=1, most_repeats=1, timed_steps=steps, seconds=0.0)})
    completed: list[Run] = []
    with scratch_directory("lockstep-tuning-") as place:
        directory = RaceDirectory(place)
        for heat, part in enumerate(_parts(positions, costs)):
            runs = [
                PlannedRun(entrant=entrant, purpose="timed", block=1, position=positions.index(entrant), heat=heat)
                for entrant in part
            ]
            directory.record(runs[0]).parent.mkdir(exist_ok=True)
            for run, why in run_heat(tried, runs, directory, {}, None).items():
                if why is not None:
                    say(f"tuning {run.entrant.backend}: {run.entrant.variant or 'its defaults'} failed: {why}")
                elif directory.is_finished(run):
                    completed.append(read_run(directory.record(run)))
    from compare.report.parts import as_one_part  # which needs packages that --help works without

    by_name = {entrant.name: entrant for entrant in positions}
    seconds = {by_name[run.entrant]: _seconds_of_a_step(run) for run in as_one_part(completed)}
    return min(seconds, key=lambda entrant: seconds[entrant], default=None)


def _seconds_of_a_step(run: Run) -> float:
    """Returns the mean time of the timed steps of a run, in seconds; infinity if there are none."""
    spans = run.timed_steps
    number = sum(span.number for span in spans)
    return sum(sum(span.seconds) for span in spans) / number if number else math.inf
