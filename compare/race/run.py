"""Runs a race: each run by the product's own command, in a process tree of its own, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compare.race.machine import DISTURBED_SHARE, ForeignLoad, look_for_idleness
from compare.race.matmul_peak import measure_apart
from compare.race.plan import Entrant, PlannedRun, RaceOptions, draw_plan
from launch.errors import UsageError
from launch.guardian import guarded
from launch.run_directory import locked
from launch.signals import Interrupted
from records.config import RACE_VARIABLE, STARTED_AT_VARIABLE, RaceContext
from records.files import write_atomically
from records.names import RECORD_NAME
from records.record import read_record
from watch.rank_files import started_ranks

PLAN_NAME = "plan.json"
RECORDS_NAME = "records"
_FAILED_NAME = "failed"
_RUNNING_NAME = "running"
_PEAKS_NAME = "peaks.json"
_MOST_ATTEMPTS = 3
# Until what a killed race has started is gone: its guardian needs one or two.
_SECONDS_FOR_ORPHANS = 15.0


class RacePlan(BaseModel):
    """What a race directory was made for; the same request goes on where it was interrupted."""

    model_config = ConfigDict(extra="forbid")

    options: RaceOptions
    entrants: list[Entrant]
    run_options: list[str]
    diagnosis_options: list[str]
    left_out: list[str]
    command: str
    race: str

    def same_request(self, other: RacePlan) -> bool:
        """Whether both ask for the same runs."""
        names = {"options", "entrants", "run_options"}
        return self.model_dump(include=names) == other.model_dump(include=names)

    def runs(self) -> list[PlannedRun]:
        """All runs, in their order."""
        return draw_plan(self.entrants, self.options)

    def arguments(self, run: PlannedRun) -> list[str]:
        """The command line of one run, but for its output directory."""
        who = run.entrant
        arguments = [who.backend, *self.run_options, f"--num-processes={who.num_processes}"]
        arguments += [f"--precision={who.precision}", f"--global-batch-size={who.global_batch_size}"]
        arguments += [f"--micro-batch-size={who.micro_batch_size}", "--save-every=never"]
        if run.purpose == "timed":
            arguments += [f"--max-steps={self.options.timed_steps}"]
        elif run.purpose == "diagnosis":
            arguments += [f"--max-steps={self.options.diagnosis_steps}", "--diagnose", *self.diagnosis_options]
        return arguments


class RaceDirectory:
    """The files of a race: its plan, the records of finished runs, and what failed ones left."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def opened(self, plan: RacePlan) -> Iterator[RacePlan]:
        """Takes the directory for this plan, or goes on with the same one; yields the plan in force.

        Raises:
            UsageError: It holds something else, or another process races in it.
        """
        plan_file = self.path / PLAN_NAME
        if self.path.exists() and not plan_file.exists() and any(self.path.iterdir()):
            raise UsageError(f"--output-dir {self.path}: not empty, and what it holds is no race; choose another")
        if plan_file.exists():
            begun = self._read_plan(plan_file)
            if not begun.same_request(plan):
                raise UsageError(
                    f"--output-dir {self.path}: holds another race ({begun.command}); choose another directory"
                )
            plan = begun
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-dir {self.path}: {error.strerror}; choose another directory") from error
        try:
            with FileLock(self.path / ".lock", timeout=0):
                if not plan_file.exists():
                    write_atomically(plan_file, plan.model_dump_json(indent=1))
                (self.path / RECORDS_NAME).mkdir(exist_ok=True)
                yield plan
        except Timeout as error:
            raise UsageError(f"--output-dir {self.path}: another process races in it; choose another") from error

    @staticmethod
    def _read_plan(path: Path) -> RacePlan:
        try:
            return RacePlan.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise UsageError(f"{path} is no plan of a race; choose another --output-dir") from error

    def record(self, run: PlannedRun) -> Path:
        return self.path / RECORDS_NAME / f"{run.name}.json"

    def is_finished(self, run: PlannedRun) -> bool:
        return self.record(run).exists()

    def records(self) -> list[Path]:
        """The records of all finished runs, and of failed ones that left one."""
        failed = (self.path / _FAILED_NAME).glob(f"*/{RECORD_NAME}")
        return [*sorted((self.path / RECORDS_NAME).glob("*.json")), *sorted(failed)]

    def failures(self, *, without_record: bool = False) -> list[str]:
        """One line for each run that did not complete."""
        failed = self.path / _FAILED_NAME
        directories = sorted(path.parent for path in failed.glob("*/why.txt"))
        return [file.read_text().strip() for file in sorted(failed.glob("*.txt"))] + [
            (directory / "why.txt").read_text().strip()
            for directory in directories
            if not (without_record and (directory / RECORD_NAME).exists())
        ]

    def running(self, attempt: str) -> Path:
        """Where this start of a run keeps its files; no two starts share a directory."""
        return self.path / _RUNNING_NAME / attempt

    def await_orphans(self) -> None:
        """Waits until nothing works any more in what a race that was killed has left running.

        Raises:
            UsageError: Something still does.
        """
        running = self.path / _RUNNING_NAME
        left = [path for path in (running, *running.glob("*")) if path.is_dir()]
        deadline = time.monotonic() + _SECONDS_FOR_ORPHANS
        while orphans := [who for directory in left if (who := _live_process(directory))]:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--output-dir {self.path}: a run that an earlier call started is still going on "
                    f"({orphans[0]}); end that process, and go on with the same command"
                )
            time.sleep(0.2)

    def keep(self, run: PlannedRun, attempt: str, foreign_share: float) -> None:
        """Keeps the record of a run that completed, with what is only known now; its model, as the others', goes."""
        record = json.loads((self.running(attempt) / RECORD_NAME).read_text())
        record["config"]["race"]["foreign_share"] = round(foreign_share, 4)
        write_atomically(self.record(run), json.dumps(record, indent=1) + "\n")
        self.clear()
        shutil.rmtree(self._failed(run), ignore_errors=True)

    def keep_failure(self, run: PlannedRun, attempt: str, why: str) -> None:
        """Keeps what a failed run left; the race tries it again when it is resumed."""
        target = self._failed(run)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        self.running(attempt).mkdir(parents=True, exist_ok=True)
        self.running(attempt).replace(target)
        (target / "why.txt").write_text(f"{run.entrant.label} ({run.purpose}, block {run.block}): {why}\n")

    def matmul_peaks(self, plan: RacePlan) -> dict[str, float | None]:
        """What square products reach in each precision on all cores, measured once a race."""
        file = self.path / _PEAKS_NAME
        if not file.exists():
            peaks = {precision: measure_apart("cpu", precision) for precision in plan.options.precision}
            write_atomically(file, json.dumps(peaks))
        measured: dict[str, float | None] = json.loads(file.read_text())
        return measured

    def collectives(self, backend: str) -> Path:
        """Where the benchmark of a library's collectives puts its results."""
        return self.path / f"collectives-{backend}.json"

    def measured_collectives(self) -> list[Path]:
        """What the benchmark has left."""
        return sorted(self.path.glob("collectives*.json"))

    def note_collectives(self, backend: str, why: str | None) -> None:
        """Remembers why a library's collectives could not be measured, or that they could."""
        note = self.path / _FAILED_NAME / f"collectives-{backend}.txt"
        note.unlink(missing_ok=True)
        if why is not None:
            note.parent.mkdir(exist_ok=True)
            note.write_text(f"collectives of {backend}: {why}\n")

    def clear(self) -> None:
        """Removes what an interrupted run left."""
        shutil.rmtree(self.path / _RUNNING_NAME, ignore_errors=True)

    def _failed(self, run: PlannedRun) -> Path:
        return self.path / _FAILED_NAME / run.name


def run_race(plan: RacePlan, directory: RaceDirectory, terminal: Console) -> None:
    """Does the runs that are not finished yet.

    Raises:
        Interrupted: The user asked to stop; what was running has been ended, what was finished is kept.
        UsageError: A run that another process has started is still going on.
    """
    directory.await_orphans()
    runs = plan.runs()
    peaks = directory.matmul_peaks(plan)
    with _ProgressOfRace(runs, directory, terminal) as progress:
        for run in runs:
            if not directory.is_finished(run):
                progress.begin(run)
                began = time.monotonic()
                attempt, foreign_share, why = _undisturbed(plan, run, directory, peaks)
                if why is None:
                    directory.keep(run, attempt, foreign_share)
                else:
                    directory.keep_failure(run, attempt, why)
                progress.end(run, time.monotonic() - began, why)
    directory.clear()


def _undisturbed(
    plan: RacePlan, run: PlannedRun, directory: RaceDirectory, peaks: dict[str, float | None]
) -> tuple[str, float, str | None]:
    """Does a run, again while others disturb it.

    Returns:
        The token of its last start, how much of the machine others took meanwhile, and why it failed.

    """
    for _ in range(_MOST_ATTEMPTS if plan.options.wait_for_idle else 1):
        directory.clear()
        attempt = secrets.token_hex(8)
        load = ForeignLoad()
        why = _run(plan, run, directory, attempt, peaks)
        foreign_share = load.share()
        # Whether to repeat follows from what others did, never from what the run measured.
        if why is not None or foreign_share <= DISTURBED_SHARE:
            break
    return attempt, foreign_share, why


def _run(
    plan: RacePlan, run: PlannedRun, directory: RaceDirectory, attempt: str, peaks: dict[str, float | None]
) -> str | None:
    """Does one run and returns None, or why it failed."""
    seen = look_for_idleness(patient=plan.options.wait_for_idle)
    context = RaceContext(
        race=plan.race,
        attempt=attempt,
        purpose=run.purpose,
        block=run.block,
        position=run.position,
        busy_share=round(seen.busy_share, 3),
        gpu_processes=seen.gpu_processes,
        matmul_flops_per_second=peaks.get(run.entrant.precision),
    )
    place = directory.running(attempt)
    done = run_command([*plan.arguments(run), f"--output-dir={place}"], {RACE_VARIABLE: context.model_dump_json()})
    if done.returncode == 0:
        is_its_own = read_record(place / RECORD_NAME).config["race"] == context.model_dump(mode="json")
        return None if is_its_own else "the record that it left is that of another run"
    lines = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    return (lines[-1].removeprefix("lockstep: ") if lines else f"ended with code {done.returncode}")[:500]


def run_command(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the product's own command line to its end, sleeping meanwhile; it ends with this process in any case.

    Raises:
        Interrupted: A signal asked to stop (see signals_raised); the command has been told so and has ended.
    """
    # No file in the user's directory can pose as a module.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **variables}
    environment.pop(STARTED_AT_VARIABLE, None)  # a run's time begins with its own command
    with guarded() as mark:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *arguments],
            env={**environment, **mark},
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


def _live_process(directory: Path) -> str | None:
    """Names a process that still works in a run's directory."""
    for rank in started_ranks(directory):
        if (pid := rank.running_pid()) is not None:
            return f"process {pid}"
    try:
        with locked(directory):
            return None
    except UsageError:
        # proc_locks(5): the process is the fifth field, the file the sixth.
        file = re.compile(rf"FLOCK\s.*\s(\d+) \S+:{directory.stat().st_ino} ")
        with contextlib.suppress(OSError):
            if found := file.search(Path("/proc/locks").read_text()):
                return f"process {found[1]}"
        return "a process that holds its directory"


class _ProgressOfRace:
    """A bar with the remaining time; without a terminal a line for each run."""

    def __init__(self, runs: list[PlannedRun], directory: RaceDirectory, terminal: Console) -> None:
        self._terminal = terminal
        self._directory = directory
        self._left = [run for run in runs if not directory.is_finished(run)]
        self._num_runs = len(runs)
        self._seconds: dict[str, list[float]] = {}
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=terminal,
            transient=True,
            auto_refresh=False,  # the race must not compute while a run is timed
            disable=not terminal.is_terminal,
        )
        done = len(runs) - len(self._left)
        self._task = self._bar.add_task("", total=len(runs), completed=done, left="")
        if done:
            terminal.print(f"going on after {done} finished run(s)")

    def __enter__(self) -> _ProgressOfRace:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def begin(self, run: PlannedRun) -> None:
        self._bar.update(self._task, description=f"{run.purpose}: {run.entrant.label}", left=self._remaining())
        self._bar.refresh()

    def end(self, run: PlannedRun, seconds: float, why: str | None) -> None:
        self._seconds.setdefault(run.purpose, []).append(seconds)
        self._left.remove(run)
        self._bar.advance(self._task)
        where = f"[{self._num_runs - len(self._left)}/{self._num_runs}]"
        outcome = f"FAILED: {why}" if why else f"{seconds:.0f} s"
        if why or not self._terminal.is_terminal:
            left = "" if self._terminal.is_terminal else f"; {self._remaining()}"
            self._terminal.print(f"{where} {run.purpose}: {run.entrant.label}: {outcome}{left}")

    def _remaining(self) -> str:
        """From the mean of what runs of the same purpose took; of another one where there is none yet."""
        seen = [second for seconds in self._seconds.values() for second in seconds]
        if not seen:
            return ""
        overall = sum(seen) / len(seen)
        means = {purpose: sum(seconds) / len(seconds) for purpose, seconds in self._seconds.items()}
        seconds = sum(means.get(run.purpose, overall) for run in self._left)
        return f"about {format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Formats a duration for people."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
