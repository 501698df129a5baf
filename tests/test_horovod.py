"""What is Horovod's alone: its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.capabilities import UnsupportedError
from backends.horovod_settings import HorovodSettings
from backends.registry import find_backend
from launch.options import read_options
from launch.resolve import settle
from tests.launching import lockstep, require_backend

NO_NUMBERS = [("HOROVOD_FUSION_THRESHOLD", "64MB"), ("HOROVOD_CYCLE_TIME", "fast")]


@pytest.mark.parametrize(("variable", "value"), NO_NUMBERS)
def test_a_variable_that_is_no_number_is_refused_before_anything(tmp_path: Path, variable: str, value: str) -> None:
    require_backend("horovod")
    options = ("--task", "token-tagging", "--max-steps", "2", "--output-dir", tmp_path / "run")
    done = lockstep("horovod", *options, env={variable: value})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{variable}={value}: is not a" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("variable", "value"), NO_NUMBERS)
def test_the_variables_are_checked_without_horovod(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    HorovodSettings().check_machine()
    monkeypatch.setenv(variable, "8")
    HorovodSettings().check_machine()
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedError, match=f"{variable}={value}: is not a.* number; correct it, or unset it"):
        HorovodSettings().check_machine()
    options = ["--num-processes=2", "--device=cpu", "--task=token-tagging"]
    refused: list[str] = []
    asked = read_options("horovod", HorovodSettings, options)
    settle("horovod", find_backend("horovod"), asked, started_at=0.0, noted=refused)
    assert any(line.startswith(f"{variable}={value}: is not a") for line in refused), refused
