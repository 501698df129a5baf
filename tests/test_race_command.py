"""What the command of a race says and leaves when it cannot do what was asked, without racing really."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from compare.race import command
from compare.race.command import run
from compare.race.directory import RaceDirectory
from launch.errors import UsageError

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
