"""The runs of a race: one after the other, each by Lockstep's own command in its own process tree."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from compare.race.collectives import seconds_still_to_come
from compare.race.directory import RaceDirectory
from compare.race.heat import run_heat
from compare.race.machine import ForeignLoad, look_for_idleness
from compare.race.pace import Pace
from compare.race.placement import variables_of
from compare.race.plan import Entrant, PlannedRun, RacePlan, heats_of
from compare.race.progress import ProgressOfRace
from compare.race.report import is_decided
from compare.report.runs import RaceFacts
from compare.results import DISTURBED_SHARE, MIN_PAIRS
from launch import own_command
from records.environment import boot_id
from records.names import RECORD_NAME
from records.record import read_record

_MAX_ATTEMPTS = 3
# Who has failed so often in a row, while others completed, is not started again: they would wait for it each time.
_MOST_FAILURES = 2


def run_race(plan: RacePlan, directory: RaceDirectory, terminal: Console, *, seconds: float) -> None:
    """Makes the runs that are not finished yet, and those of further blocks while there is time.

    Args:
        plan: The plan of the race.
        directory: The directory of the race.
        terminal: Shows how far it is.
        seconds: The time for all of its runs.

    Raises:
        Interrupted: The user asked to stop. The run has been ended; finished runs are kept.
        UsageError: A run that another process has started is still going on.
    """
    directory.await_orphans()
    runs = plan.runs()
    finished = [heat for heat in heats_of(runs) if directory.is_over(heat)]
    left = [run for run in runs if not any(run in heat for heat in finished)]
    peaks = directory.matmul_peaks(plan)
    pace = Pace(plan, left, seconds)
    afterwards = seconds_still_to_come(plan, directory)
    with ProgressOfRace(pace, len(runs) - len(left), terminal, seconds_afterwards=afterwards) as progress:
        for heat in heats_of(left):
            is_timed = heat[0].purpose == "timed"
            able = _able(heat, runs, directory)
            is_late = is_timed and (heat not in pace.to_come() or _ends_early(plan, heat[0].block, runs, directory))
            if is_late:
                pace.skip_block(heat)
                continue
            if not able:
                pace.skip(heat)
                continue
            progress.begin(able)
            if is_timed:
                directory.forget(heat)
                reasons = run_heat(plan, able, directory, peaks, progress)
            else:
                (run,) = able
                peak = peaks.get(run.entrant.precision)
                reasons = {run: _run_undisturbed(plan, run, directory, peak, progress)}
            for run in set(heat) - set(able):
                directory.leave_out(run)
            progress.end(heat, reasons)
            for run in set(able) - set(_able(able, runs, directory)):
                terminal.print(directory.give_up(run, f"it failed {_MOST_FAILURES} times in a row"))
    directory.clear()


def _able(heat: Sequence[PlannedRun], runs: Sequence[PlannedRun], directory: RaceDirectory) -> list[PlannedRun]:
    """Returns the runs of a heat but for those of entrants that failed in each of their latest starts beside others.

    Args:
        heat: Runs that take place together.
        runs: All runs of the race, in the order in which they take place.
        directory: The directory of the race.
    """
    latest: dict[Entrant, list[bool]] = {run.entrant: [] for run in heat}
    for together in heats_of(list(runs)):
        for run in together if any(map(directory.is_finished, together)) else ():
            if run.entrant in latest and directory.has_ended(run):
                latest[run.entrant].append(directory.is_finished(run))
    # Without the entrant that the parts of a block have in common, they could not be compared.
    starts = Counter((run.entrant, run.block) for run in runs if run.purpose == "timed")
    shared = {entrant for (entrant, _), number in starts.items() if number > 1}
    given_up = {
        who for who, ended in latest.items() if len(ended) >= _MOST_FAILURES and not any(ended[-_MOST_FAILURES:])
    }
    return [run for run in heat if run.entrant not in given_up - shared]


def _ends_early(plan: RacePlan, block: int, runs: Sequence[PlannedRun], directory: RaceDirectory) -> bool:
    """Whether the blocks before this one have shown what the user wants to know."""
    until = plan.options.until
    if until is None or block <= MIN_PAIRS:
        return False
    if any(directory.has_ended(run) for run in runs if run.purpose == "timed" and run.block == block):
        return False  # a block that has begun is completed
    timed = [run for run in runs if run.purpose == "timed" and run.block < block]
    given_up = set(timed) - set(_able(timed, runs, directory))
    without = [place(run) for run in given_up for place in (directory.record, directory.record_of_failure)]
    return is_decided(directory, until, without=without)


def _run_undisturbed(
    plan: RacePlan, run: PlannedRun, directory: RaceDirectory, peak: float | None, progress: ProgressOfRace
) -> str | None:
    """Makes a run, repeats it while other programs disturb it, and keeps what it left.

    Args:
        plan: The plan of the race.
        run: The run.
        directory: The directory of the race.
        peak: What square matrix products reach on this machine, in operations a second; None if not known.
        progress: Is told what the race waits for.

    Returns:
        Why the run failed; None if it completed.
    """
    attempts = _MAX_ATTEMPTS if plan.options.wait_for_idle else 1
    for attempt in range(1, attempts + 1):
        directory.clear()
        output_dir = directory.running(secrets.token_hex(8))
        seen = look_for_idleness(patient=plan.options.wait_for_idle, say=progress.say)
        load = ForeignLoad()
        why = _run(plan, run, output_dir)
        foreign_share = load.share()
        # Whether to repeat depends on what other programs did, never on what the run measured.
        if why is not None or foreign_share <= DISTURBED_SHARE or attempt == attempts:
            break
        progress.say(f"other programs took {foreign_share:.0%} of the cores: once more, {run.entrant.label}")
    facts = RaceFacts(
        race=plan.race,
        boot_id=boot_id(),
        purpose=run.purpose,
        entrant=run.entrant.name,
        role=run.entrant.role,
        own_settings=run.entrant.own_settings,
        block=run.block,
        position=run.position,
        busy_share=round(seen.busy_share, 3),
        gpu_processes=seen.gpu_processes,
        foreign_share=round(foreign_share, 4),
        matmul_flops_per_second=peak,
        core_slowdown=plan.core_slowdowns.get(run.entrant.num_processes),
    )
    directory.settle(run, output_dir, facts, why)
    return why


def _run(plan: RacePlan, run: PlannedRun, output_dir: Path) -> str | None:
    """Makes one run and returns None, or why it failed."""
    who = run.entrant
    # A peer trains without resting, as its address says.
    module = ("compare.race.entrant", who.rank_program, "-") if who.role == "peer" else own_command.PROGRAM
    done = own_command.run_command(plan.starting(run, output_dir), variables_of(plan, run), module=module)
    why, place = own_command.why_it_failed(done, output_dir), own_command.directory_of_record(output_dir)
    if why is None and read_record(place / RECORD_NAME).config.output_dir != place:
        return "the record in its directory is that of another run"  # no other start of a run has this directory
    return why
