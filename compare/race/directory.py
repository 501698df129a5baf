"""The directory of a race: its plan, the records of finished runs, and what failed runs left."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from compare.race.matmul_peak import measure_apart
from compare.race.plan import PlannedRun, RacePlan
from compare.report.reading import PLAN_NAME
from compare.report.runs import RaceFacts, race_file
from launch.errors import UsageError
from launch.own_command import directory_of_record
from launch.run_directory import locked
from records.files import write_atomically
from records.names import RECORD_NAME
from watch.rank_files import started_ranks

_RECORDS_NAME = "records"
_FAILED_NAME = "failed"
_RUNNING_NAME = "running"
_PEAKS_NAME = "peaks.json"
_REASON_NAME = "why.txt"
# How long to wait until the processes of a race that was killed have ended: their guardian needs a second or two.
_SECONDS_FOR_ORPHANS = 15.0


class RaceDirectory:
    """The files of a race.

    Attributes:
        path: Where they are.
        is_open: Whether this command races there, and no other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.is_open = False

    def require_place(self) -> None:
        """Makes sure that a race can begin or go on here.

        Raises:
            UsageError: The directory holds something else.
        """
        if self.path.exists() and not self.holds_race and any(self.path.iterdir()):
            raise UsageError(
                f"--output-dir {self.path}: is not empty and does not contain a race; choose another directory"
            )

    def begun(self, plan: RacePlan) -> RacePlan | None:
        """Returns the plan of the race that has begun here, if that was asked for in the same way; None if none has.

        Raises:
            UsageError: The directory holds something else.
        """
        self.require_place()
        if not self.holds_race:
            return None
        begun = self._plan("--output-dir ", "choose another directory")
        if not begun.same_request(plan):
            raise UsageError(
                f"--output-dir {self.path}: holds another race ({begun.command}); choose another directory"
            )
        return begun

    @contextlib.contextmanager
    def opened(self, plan: RacePlan) -> Iterator[RacePlan]:
        """Takes the directory for this plan, or resumes the race of the same plan; yields the plan in force.

        Raises:
            UsageError: The directory holds something else, or another process races in it.
        """
        plan_file = self.path / PLAN_NAME
        plan = self.begun(plan) or plan
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-dir {self.path}: {error.strerror}; choose another directory") from error
        try:
            with FileLock(self.path / ".lock", timeout=0):
                if not plan_file.exists():
                    write_atomically(plan_file, plan.model_dump_json(indent=1))
                (self.path / _RECORDS_NAME).mkdir(exist_ok=True)
                self.is_open = True
                yield plan
        except Timeout as error:
            raise UsageError(
                f"--output-dir {self.path}: another process races in it; choose another directory"
            ) from error

    @property
    def holds_race(self) -> bool:
        """Whether a race has begun here, whose plan is in force."""
        return (self.path / PLAN_NAME).exists()

    def plan(self) -> RacePlan:
        """Returns the plan of the race that has begun here.

        Raises:
            UsageError: It is none of this version.
        """
        return self._plan("", f"give the records of the race: {self.path / _RECORDS_NAME}/*.json")

    def _plan(self, option: str, remedy: str) -> RacePlan:
        try:
            return RacePlan.model_validate_json((self.path / PLAN_NAME).read_bytes())
        except ValueError as error:
            raise UsageError(
                f"{option}{self.path}: {PLAN_NAME} is not the plan of a race of this version of Lockstep; {remedy}"
            ) from error

    @property
    def failed(self) -> Path:
        """Where failed runs leave their files."""
        return self.path / _FAILED_NAME

    def record(self, run: PlannedRun) -> Path:
        """Returns where the record of a finished run is kept."""
        return self.path / _RECORDS_NAME / f"{run.name}.json"

    def record_of_failure(self, run: PlannedRun) -> Path:
        """Returns where the record of a failed run is kept, if it left one."""
        return self.failed / run.name / RECORD_NAME

    def is_finished(self, run: PlannedRun) -> bool:
        """Tells whether a run has completed."""
        return self.record(run).exists()

    def has_ended(self, run: PlannedRun) -> bool:
        """Tells whether a run has completed or failed."""
        return self.is_finished(run) or (self.failed / run.name / _REASON_NAME).exists()

    def is_over(self, together: Sequence[PlannedRun]) -> bool:
        """Tells whether runs that took place together need not be repeated: all have ended, and one has completed.

        If the race was killed while it kept what they left, all of them are repeated.
        """
        return all(map(self.has_ended, together)) and any(map(self.is_finished, together))

    def forget(self, together: Sequence[PlannedRun]) -> None:
        """Removes what an earlier attempt has kept of runs that are about to take place together once more."""
        for run in together:
            for file in (self.record(run), race_file(self.record(run))):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.failed / run.name, ignore_errors=True)
            self._note_of(run).unlink(missing_ok=True)

    def records(self) -> list[Path]:
        """Returns the records of all finished runs, and of the failed runs that left one."""
        kept = (path for path in (self.path / _RECORDS_NAME).glob("*.json") if not path.name.endswith(".race.json"))
        return [*sorted(kept), *sorted(self.failed.glob(f"*/{RECORD_NAME}"))]

    def failures(self, *, without_record: bool = False) -> list[str]:
        """Returns one line for each failure.

        Args:
            without_record: Leave out the runs that left a record, which says the same.
        """
        reasons = (path for path in self.failed.glob(f"*/{_REASON_NAME}") if path.stat().st_size)
        directories = sorted(path.parent for path in reasons)
        return [file.read_text().strip() for file in sorted(self.failed.glob("*.txt"))] + [
            (directory / _REASON_NAME).read_text().strip()
            for directory in directories
            if not (without_record and (directory / RECORD_NAME).exists())
        ]

    def running(self, attempt: str) -> Path:
        """Returns the output directory of one start of a run; no two starts share it."""
        return self.path / _RUNNING_NAME / attempt

    def await_orphans(self) -> None:
        """Waits until no process of a race that was killed works in this directory any more.

        Raises:
            UsageError: A process still does.
        """
        running = self.path / _RUNNING_NAME
        left = [path for path in (running, *running.glob("*"), *running.glob("*/node*")) if path.is_dir()]
        deadline = time.monotonic() + _SECONDS_FOR_ORPHANS
        while orphans := [who for directory in left if (who := _live_process(directory))]:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--output-dir {self.path}: a run that an earlier call started is still going on "
                    f"({orphans[0]}); end that process, then repeat this command"
                )
            time.sleep(0.2)

    def settle(self, run: PlannedRun, output_dir: Path, facts: RaceFacts, why: str | None) -> None:
        """Keeps what a run left, which failed if `why` is given."""
        if why is None:
            self.keep(run, output_dir, facts)
        else:
            self.keep_failure(run, output_dir, facts, why)

    def keep(self, run: PlannedRun, output_dir: Path, facts: RaceFacts) -> None:
        """Keeps the record of a run that completed, as the run wrote it; its model and its other files go."""
        # In this order: a run counts as finished once its record is there.
        write_atomically(race_file(self.record(run)), facts.model_dump_json(indent=1) + "\n")
        (directory_of_record(output_dir) / RECORD_NAME).replace(self.record(run))
        shutil.rmtree(output_dir, ignore_errors=True)
        shutil.rmtree(self.failed / run.name, ignore_errors=True)

    def keep_failure(self, run: PlannedRun, output_dir: Path, facts: RaceFacts, why: str) -> None:
        """Keeps what a failed run left; a race that is resumed tries it again if none of its heat has completed."""
        target = self.failed / run.name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        output_dir.replace(target)
        if (found := directory_of_record(target)) != target:
            (found / RECORD_NAME).replace(target / RECORD_NAME)
        if (target / RECORD_NAME).exists():
            write_atomically(race_file(target / RECORD_NAME), facts.model_dump_json(indent=1) + "\n")
        (target / _REASON_NAME).write_text(f"{run.entrant.label} ({run.purpose}, block {run.block}): {why}\n")

    def give_up(self, run: PlannedRun, why: str) -> str:
        """Notes that an entrant is not started again after this run, for the report; returns the sentence."""
        sentence = f"{run.entrant.label} is not started again after block {run.block}: {why}"
        self._note_of(run).write_text(f"{sentence}\n")
        return sentence

    def _note_of(self, run: PlannedRun) -> Path:
        return self.failed / f"{run.name}.txt"

    def leave_out(self, run: PlannedRun) -> None:
        """Notes that a run is not started: it has ended without a reason of its own."""
        (self.failed / run.name).mkdir(parents=True, exist_ok=True)
        (self.failed / run.name / _REASON_NAME).touch()

    def matmul_peaks(self, plan: RacePlan) -> dict[str, float | None]:
        """Returns what square products reach on all cores in each precision, which is measured once in a race."""
        file = self.path / _PEAKS_NAME
        if not file.exists():
            peaks = {precision: measure_apart("cpu", precision) for precision in plan.options.precision}
            write_atomically(file, json.dumps(peaks))
        measured: dict[str, float | None] = json.loads(file.read_text())
        return measured

    def collectives(self, backend: str) -> Path:
        """Returns where the benchmark of a library's collectives writes its results."""
        return self.path / f"collectives-{backend}.json"

    def measured_collectives(self) -> list[Path]:
        """Returns the results of the benchmark of collectives that are there."""
        return sorted(self.path.glob("collectives*.json"))

    def note_collectives(self, backend: str, why: str | None) -> None:
        """Notes why the collectives of a library could not be measured, or with None that they were."""
        note = self.failed / f"collectives-{backend}.txt"
        note.unlink(missing_ok=True)
        if why is not None:
            note.parent.mkdir(exist_ok=True)
            note.write_text(f"collectives of {backend}: {why}\n")

    def clear(self) -> None:
        """Removes what an interrupted run left."""
        shutil.rmtree(self.path / _RUNNING_NAME, ignore_errors=True)


def _live_process(directory: Path) -> str | None:
    """Names a process that still works in the directory of a run; returns None if there is none."""
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
