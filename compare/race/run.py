"""The runs of a race: one after the other, each by Lockstep's own command in its own process tree."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from compare.race.directory import RaceDirectory
from compare.race.heat import run_heat
from compare.race.machine import ForeignLoad, look_for_idleness
from compare.race.placement import variables_of
from compare.race.plan import PlannedRun, RacePlan, heats_of
from compare.race.progress import ProgressOfRace
from compare.race.report import is_decided
from compare.report.runs import RaceFacts
from compare.results import DISTURBED_SHARE, MIN_PAIRS
from launch.engines.environment import command_environment
from launch.guardian import guarded
from launch.signals import Interrupted
from records.names import RECORD_NAME
from records.record import read_record

_MAX_ATTEMPTS = 3
# The command line of a run, and that of a peer, which trains without resting.
_PROGRAM = ("launch",)
_PEER_PROGRAM = ("compare.race.entrant", "compare.race.peers.rank", "-")


def run_race(plan: RacePlan, directory: RaceDirectory, terminal: Console) -> None:
    """Makes the runs that are not finished yet.

    Raises:
        Interrupted: The user asked to stop. The run has been ended; finished runs are kept.
        UsageError: A run that another process has started is still going on.
    """
    directory.await_orphans()
    runs = plan.runs()
    finished = [heat for heat in heats_of(runs) if any(directory.is_finished(run) for run in heat)]
    left = [run for run in runs if not any(run in heat for heat in finished)]
    peaks = directory.matmul_peaks(plan)
    with ProgressOfRace(plan, left, terminal) as progress:
        for heat in heats_of(left):
            progress.begin(heat)
            if heat[0].purpose == "timed":
                if _ends_early(plan, heat[0].block, directory):
                    progress.skip(heat)
                    continue
                reasons = run_heat(plan, heat, directory, peaks, progress)
            else:
                (run,) = heat
                peak = peaks.get(run.entrant.precision)
                reasons = {run: _run_undisturbed(plan, run, directory, peak, progress)}
            progress.end(heat, reasons)
    directory.clear()


def _ends_early(plan: RacePlan, block: int, directory: RaceDirectory) -> bool:
    """Whether the blocks before this one have shown what the user wants to know."""
    until = plan.options.until
    return until is not None and block > MIN_PAIRS and is_decided(directory, until)


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
    for _ in range(_MAX_ATTEMPTS if plan.options.wait_for_idle else 1):
        directory.clear()
        output_dir = directory.running(secrets.token_hex(8))
        load = ForeignLoad()
        seen = look_for_idleness(patient=plan.options.wait_for_idle, say=progress.say)
        why = _run(plan, run, output_dir)
        foreign_share = load.share()
        # Whether to repeat depends on what other programs did, never on what the run measured.
        if why is not None or foreign_share <= DISTURBED_SHARE:
            break
        progress.say(f"other programs took {foreign_share:.0%} of the cores: once more, {run.entrant.label}")
    facts = RaceFacts(
        race=plan.race,
        purpose=run.purpose,
        entrant=run.entrant.name,
        role=run.entrant.role,
        block=run.block,
        position=run.position,
        busy_share=round(seen.busy_share, 3),
        gpu_processes=seen.gpu_processes,
        foreign_share=round(foreign_share, 4),
        matmul_flops_per_second=peak,
    )
    directory.settle(run, output_dir, facts, why)
    return why


def _run(plan: RacePlan, run: PlannedRun, output_dir: Path) -> str | None:
    """Makes one run and returns None, or why it failed."""
    module = _PEER_PROGRAM if run.entrant.role == "peer" else _PROGRAM
    arguments = [*plan.arguments(run), f"--output-dir={output_dir}"]
    done = run_command(arguments, variables_of(plan, run), module=module)
    if done.returncode == 0:
        # No other start of a run has this directory.
        is_its_own = read_record(output_dir / RECORD_NAME).config.output_dir == output_dir
        return None if is_its_own else "the record in its directory is that of another run"
    if (output_dir / RECORD_NAME).exists():
        why = read_record(output_dir / RECORD_NAME).error
    else:  # the run was refused, or ended before it could write a record
        why = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("lockstep: ")
    return (why or f"it ended with exit code {done.returncode}")[:500]


def run_command(
    arguments: list[str], variables: Mapping[str, str] = MappingProxyType({}), *, module: Sequence[str] = _PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Runs Lockstep's own command line to its end; in any case it ends with this process.

    Args:
        arguments: The command, and its options.
        variables: What to add to its environment.
        module: The module to run, and its first arguments.

    Raises:
        Interrupted: A signal asked to stop (see signals_raised). The command has received SIGTERM and has ended.
    """
    with guarded() as mark:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            env={**command_environment(), **variables, **mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate()
        except Interrupted:
            process.terminate()
            process.communicate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)
