"""What the command of a race says and leaves when it cannot do what was asked, without racing really."""

from __future__ import annotations

import errno
import io
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compare.race import command
from compare.race.collectives import measure_collectives, seconds_of_collectives, seconds_still_to_come
from compare.race.command import run
from compare.race.directory import RaceDirectory
from compare.race.heat import require_place_for_sockets
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, RacePlan
from compare.race.report import info_of
from launch import own_command
from launch.errors import UsageError
from launch.guardian import scratch_directory
from launch.quantities import format_duration
from records import processor
from records.processor import SLOW_BF16
from tests.made_races import plan_of

OPTIONS = ["--backends", "single", "--num-processes", "1", "--task", "token-tagging", "--no-collectives"]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps are taken and no runs are made."""
    for name in ("schedule_race", "run_race"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    monkeypatch.setattr(command, "write_report", lambda *_: 0)


def _find_disk_full(*arguments: Any, **_: Any) -> None:
    for directory in arguments:
        if isinstance(directory, RaceDirectory):
            directory.running("1234").mkdir(parents=True)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file")


@pytest.mark.parametrize("name", ["run_race", "write_report"])
def test_a_race_on_a_full_disk_says_how_it_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, name, _find_disk_full)
    assert run([*OPTIONS, "--output-dir", str(tmp_path / "race")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    begin = "lockstep: /full/file: No space left on device; finished runs are kept, resume with: launch/run.sh "
    assert said.startswith(begin)
    assert said.endswith(f" --output-dir {tmp_path / 'race'}")
    assert not (tmp_path / "race" / "running").exists()


def test_a_race_that_cannot_begin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "core_slowdowns", _find_disk_full)
    with pytest.raises(UsageError, match=r"^/full/file: No space left on device; choose another path$"):
        run([*OPTIONS, "--output-dir", str(tmp_path / "race")])
    assert not (tmp_path / "race").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_temporary_files_whose_paths_are_too_long_for_sockets_are_refused_before_anything_is_measured(
    dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 90}")
    monkeypatch.setattr(command, "schedule_race", lambda *_: pytest.fail("steps are taken"))
    with pytest.raises(UsageError, match=r"^TMPDIR /tmp/x+: is \d+ bytes too long for a race, .* shorter path$"):
        run([*OPTIONS, *dry, "--output-dir", str(tmp_path / "race")])
    assert not (tmp_path / "race").exists()


def test_the_longest_path_that_is_not_refused_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        longest, *_ = [
            place for number in range(90, 0, -1) if _will_do(place := f"{short}/{number * 'x'}", monkeypatch)
        ]
        assert len(longest) > 70
        Path(longest).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", longest)
        with scratch_directory("lockstep-race-") as sockets, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(sockets / "9999"))


def _will_do(place: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a race may have its temporary files there."""
    monkeypatch.setattr(tempfile, "tempdir", place)
    try:
        require_place_for_sockets()
    except UsageError:
        return False
    return True


def test_a_dry_run_refuses_a_directory_that_the_race_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="is not empty and does not contain a race"):
        run([*OPTIONS, "--dry-run", "--output-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_dry_run_shows_the_plan_of_a_race_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The race would go on by it, and take no steps to plan another."""
    race = tmp_path / "race"
    assert run([*OPTIONS, "--output-dir", str(race)]) == 0
    plan = RacePlan.model_validate_json((race / "plan.json").read_bytes())
    first, *_ = plan.runs()
    RaceDirectory(race).record(first).touch()
    before = {path: path.stat().st_mtime_ns for path in race.rglob("*")}
    monkeypatch.setattr(command, "schedule_race", lambda *_: pytest.fail("steps are taken"))
    capsys.readouterr()
    assert run([*OPTIONS, "--dry-run", "--output-dir", str(race)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith(f"; it has begun in {race}, where 1 run(s) are finished")
    assert {path: path.stat().st_mtime_ns for path in race.rglob("*")} == before
    with pytest.raises(UsageError, match="holds another race"):
        run([*OPTIONS, "--order-seed", "1", "--dry-run", "--output-dir", str(race)])


@pytest.mark.parametrize(
    ("precision", "has_it", "is_told"), [("fp32,bf16", False, True), ("fp32,bf16", True, False), ("fp32", False, False)]
)
def test_a_race_in_bf16_says_that_the_processor_has_none(
    precision: str,
    has_it: bool,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a line before it begins, and in its report, which may be made where the processor is another one."""
    monkeypatch.setattr(processor, "has_bf16", lambda: has_it)
    race = tmp_path / "race"
    options = [*OPTIONS, "--device", "cpu", "--dtype", "float32", "--precision", precision, "--output-dir", str(race)]
    for dry in ([], ["--dry-run"]):
        assert run([*options, *dry]) == 0
        assert capsys.readouterr().out.splitlines().count(f"bf16: {SLOW_BF16}") == is_told
    monkeypatch.setattr(processor, "has_bf16", lambda: not has_it)
    directory = RaceDirectory(race)
    assert info_of(directory, directory.plan()).facts.get("bf16") == (SLOW_BF16 if is_told else None)


def test_collectives_are_measured_on_as_many_ranks_as_a_library_takes_part_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one has no GPU for each of four ranks, it still has two."""
    entrants = [
        Entrant(backend=name, num_processes=number, precision="fp32", accumulation=1, global_batch_size=32, role=role)
        for name, number, role in [
            ("single", 1, "backend"), ("ddp", 4, "backend"), ("ddp", 2, "backend"), ("ddp", 2, "bare"),
            ("horovod", 2, "backend"), ("accelerate", 4, "backend"),
        ]
    ]  # fmt: skip
    plan = plan_of(RaceOptions(num_processes=[1, 2, 4]), entrants)
    asked: list[list[str]] = []

    def run_command(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(own_command, "run_command", run_command)
    directory, said = RaceDirectory(tmp_path), io.StringIO()
    one = seconds_of_collectives(entrants[1:2], plan.options)
    assert seconds_of_collectives(entrants, plan.options) == seconds_still_to_come(plan, directory) == 3 * one > 0
    measure_collectives(plan, {"ddp": "cpu", "horovod": "cpu"}, directory, Console(file=said, width=200))
    wanted = [
        ["allreduce", "--backends=ddp", "--num-processes=2,4"],
        ["allreduce", "--backends=horovod", "--num-processes=2"],
    ]
    assert [arguments[:3] for arguments in asked] == wanted
    assert said.getvalue().splitlines() == [
        f"measuring the collectives of ddp on 2 and 4 ranks: about {format_duration(2 * one)}",
        f"measuring the collectives of horovod on 2 ranks: about {format_duration(one)}",
    ]
    # The same command, repeated, measures those that are missing.
    directory.collectives("ddp").touch()
    assert seconds_still_to_come(plan, directory) == one
    measure_collectives(plan, {"horovod": "cpu"}, directory, Console(quiet=True))
    assert [arguments[:3] for arguments in asked[2:]] == wanted[1:]
