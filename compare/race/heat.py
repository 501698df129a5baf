"""A heat: one start of each entrant of a group of equal conditions; they stay alive and take turns.

All take the same steps of the same plan, a few at a time, in an order that is drawn anew for each round. So entrants
are timed on the same batches within a fraction of a second of each other, and neither what is in a batch nor what the
machine does in the course of a second is taken for a difference between them.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

from compare.race.directory import RaceDirectory
from compare.race.live import EntrantEnded, LiveEntrant, step_seconds_of
from compare.race.machine import Idleness, look_for_idleness
from compare.race.messages import Turn
from compare.race.placement import variables_of
from compare.race.plan import PlannedRun, RacePlan
from compare.race.progress import ProgressOfRace
from compare.race.scattered_memory import scattered_memory_held
from compare.report.reading import read_run
from compare.report.runs import RaceFacts, TurnFacts
from launch.errors import UsageError
from launch.guardian import scratch_directory
from launch.starters.environment import command_environment
from records.environment import boot_id
from records.throughput import NUM_WARMUP_STEPS

# Shorter turns make more pairs that are closer in time, but each begins with steps that are not timed. On a processor
# whose speed changed by a tenth within two tenths of a second, these left half of the error of turns of 0.2 s, and
# still shorter ones left more (docs/results/README.md).
SECONDS_OF_A_TURN = 0.07
# After a rest, caches are cold and clocks are low: steps are timed from so many seconds on. The first step of a turn
# takes 3 % longer than the others, of all entrants alike, and the second one 0.4 % (docs/results/README.md).
_SECONDS_TO_WARM_UP = 0.01
_FEWEST_TIMED_STEPS = 3
# Where the sockets of entrants are, in the directory for temporary files: tempfile adds so many characters to the name.
_NAME_OF_SOCKETS, _CHARACTERS_ADDED = "lockstep-race-", 8
# Of the path of a socket, without the null byte behind it: unix(7).
_MOST_BYTES_OF_A_SOCKET = 107


@dataclass
class _Starter:
    """One entrant in this heat, and what was seen of it."""

    run: PlannedRun
    output_dir: Path
    live: LiveEntrant
    turns: list[TurnFacts] = field(default_factory=list)
    why: str | None = None


def run_heat(
    plan: RacePlan,
    runs: list[PlannedRun],
    directory: RaceDirectory,
    peaks: dict[str, float | None],
    progress: ProgressOfRace | None,
) -> dict[PlannedRun, str | None]:
    """Runs a heat, and keeps what each entrant left.

    Args:
        plan: The plan of the race.
        runs: The entrants, in the order in which they are started.
        directory: The directory of the race.
        peaks: What square matrix products reach on this machine in each precision, in operations a second.
        progress: Is told of each round, and of what the race waits for; None to say nothing.

    Returns:
        For each entrant why it failed, or None if it came to the end.
    """
    seen = look_for_idleness(patient=plan.options.wait_for_idle, say=progress.say if progress else _say_nothing)
    on_round = partial(progress.begin_round, runs) if progress else _say_nothing
    with contextlib.ExitStack() as stack:
        if plan.options.placement:
            stack.enter_context(scattered_memory_held())
        starters = stack.enter_context(_started(plan, runs, directory))
        _take_turns(starters, plan, _turns_of_first_part(runs, directory), on_round)
    for starter in starters:
        facts = _facts(plan, starter, seen, peaks.get(starter.run.entrant.precision))
        directory.settle(starter.run, starter.output_dir, facts, starter.why)
    return {starter.run: starter.why for starter in starters}


def require_place_for_sockets() -> None:
    """Makes sure that entrants can listen where `run_heat` has them do so.

    Raises:
        UsageError: The path of the directory for temporary files is too long.
    """
    place = tempfile.gettempdir()
    longest = os.path.join(place, _NAME_OF_SOCKETS + _CHARACTERS_ADDED * "x", "9999")  # noqa: PTH118 (only its length)
    if (excess := len(os.fsencode(longest)) - _MOST_BYTES_OF_A_SOCKET) > 0:
        raise UsageError(
            f"TMPDIR {place}: is {excess} bytes too long for a race, whose sockets are there; set it to a directory "
            "with a shorter path"
        )


def _say_nothing(*_: object) -> None:
    pass


@contextlib.contextmanager
def _started(plan: RacePlan, runs: list[PlannedRun], directory: RaceDirectory) -> Iterator[list[_Starter]]:
    """Starts all entrants at once and waits until each rests before its first turn."""
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(scratch_directory(_NAME_OF_SOCKETS))
        starters: list[_Starter] = []
        try:
            for number, run in enumerate(runs):
                output_dir = directory.running(secrets.token_hex(8))
                num_processes = run.entrant.num_processes
                elsewhere = plan.options.network.address(num_processes)
                live = LiveEntrant(
                    plan.starting(run, output_dir),
                    num_processes=num_processes,
                    address=elsewhere or sockets / str(number),
                    num_keepers=plan.options.network.num_nodes(num_processes) if elsewhere else 0,
                    environment={**command_environment(), **variables_of(plan, run)},
                    rank_program=run.entrant.rank_program,
                )
                starters.append(_Starter(run, output_dir, stack.enter_context(live)))
            for starter in starters:
                with _noting_the_end(starter):
                    starter.live.get_ready()
            yield starters
        except BaseException:
            for starter in starters:
                starter.live.terminate()  # all at once, before each is waited for
            raise


@contextlib.contextmanager
def _noting_the_end(starter: _Starter) -> Iterator[None]:
    """Notes why an entrant has ended, so that the race can go on without it."""
    try:
        yield
    except EntrantEnded:
        starter.why = starter.live.end() or "it ended before its last turn"


def _turns_of_first_part(runs: list[PlannedRun], directory: RaceDirectory) -> list[Turn]:
    """Returns the turns of the first part of a block, which the others repeat; nothing if this is the first."""
    for run in runs:
        first = run.model_copy(update={"heat": 0})
        if run.heat and directory.is_finished(first) and (race := read_run(directory.record(first)).race):
            return [Turn(turn.first_step - 1, turn.first_step + turn.num_steps - 1) for turn in race.turns]
    return []


def _take_turns(
    starters: list[_Starter], plan: RacePlan, given: list[Turn], on_round: Callable[[int, int], None]
) -> None:
    order = random.Random(f"{plan.options.order_seed} {starters[0].run.block}")
    num_steps = plan.schedule.timed_steps
    turn = Turn(warm_through=1, through=min(NUM_WARMUP_STEPS, num_steps))
    number = 0
    while running := [starter for starter in starters if starter.why is None]:
        on_round(turn.through, num_steps)
        for position, starter in enumerate(order.sample(running, len(running))):
            with _noting_the_end(starter):
                starter.turns.append(_one_turn(starter.live, turn, starter.run.block, number, position))
        if turn.through == num_steps:
            _let_all_end([starter for starter in running if starter.why is None])
            return
        if number == 0:
            step_seconds = [of_a_step(one.turns[0]) for one in running if one.turns]
            warm, timed = steps_of_a_turn(step_seconds)
            steps_per_epoch = running[0].live.steps_per_epoch
        number += 1
        turn = (
            given[number]
            if number < len(given)
            else next_turn(turn.through, warm, timed, steps_per_epoch=steps_per_epoch, num_steps=num_steps)
        )


def _let_all_end(starters: list[_Starter]) -> None:
    """Lets entrants save, all at once, and waits for their ends."""
    for starter in starters:
        starter.live.let_go()
    for starter in starters:
        starter.why = starter.live.end()


def of_a_step(turn: TurnFacts) -> float:
    """Returns the time of a step: of the shortest one, or of the mean where a GPU gives one value for all of them."""
    return min(turn.step_seconds) * len(turn.step_seconds) / turn.num_steps


def steps_of_a_turn(step_seconds: list[float]) -> tuple[int, int]:
    """Returns how many steps of a turn are not timed, and how many are.

    Args:
        step_seconds: For each entrant the time of a step.
    """
    if not step_seconds:  # no entrant is left
        return 1, _FEWEST_TIMED_STEPS
    return (
        max(1, math.ceil(_SECONDS_TO_WARM_UP / min(step_seconds))),
        max(_FEWEST_TIMED_STEPS, round(SECONDS_OF_A_TURN / median(step_seconds))),
    )


def next_turn(taken: int, warm: int, timed: int, *, steps_per_epoch: int, num_steps: int) -> Turn:
    """Returns the turn after `taken` steps.

    No turn goes beyond the end of an epoch, since an entrant may evaluate there, or begin the next one. What is left
    there and is shorter than a turn belongs to the turn before. Where an epoch leaves a single step, it is timed.

    Args:
        taken: The steps that were taken.
        warm: How many steps of a turn are not timed.
        timed: How many steps of a turn are timed.
        steps_per_epoch: The number of steps of an epoch.
        num_steps: The number of all steps.
    """
    end = min((taken // steps_per_epoch + 1) * steps_per_epoch, num_steps)
    through = taken + warm + timed
    if end - through < warm + timed:
        through = end
    return Turn(warm_through=min(taken + warm, through - 1), through=through)


def _one_turn(live: LiveEntrant, turn: Turn, block: int, number: int, position: int) -> TurnFacts:
    # Each start begins one core further, since there may be more cores than rounds.
    taken = live.take(turn, number + block)
    counted = [one.instructions for one in taken if one.instructions is not None]
    return TurnFacts(
        round=number,
        position=position,
        first_step=turn.warm_through + 1,
        num_steps=turn.through - turn.warm_through,
        step_seconds=step_seconds_of(taken),
        cpu_seconds=sum(one.cpu_seconds for one in taken),
        instructions=sum(counted) if len(counted) == len(taken) else None,
        foreign_share=round(live.foreign_share, 4),
        cores=live.cores,
    )


def _facts(plan: RacePlan, starter: _Starter, seen: Idleness, peak: float | None) -> RaceFacts:
    shares = [turn.foreign_share for turn in starter.turns]
    return RaceFacts(
        race=plan.race,
        boot_id=boot_id(),
        purpose=starter.run.purpose,
        entrant=starter.run.entrant.name,
        role=starter.run.entrant.role,
        own_settings=starter.run.entrant.own_settings,
        block=starter.run.block,
        position=starter.run.position,
        heat=starter.run.heat,
        busy_share=round(seen.busy_share, 3),
        gpu_processes=seen.gpu_processes,
        foreign_share=max(0.0, round(fmean(shares), 4)) if shares else 0.0,
        matmul_flops_per_second=peak,
        core_slowdown=plan.core_slowdowns.get(starter.run.entrant.num_processes),
        turns=starter.turns,
    )
