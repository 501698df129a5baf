"""What is Horovod's alone: its variables, and how it was built."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from backends import horovod_settings
from backends.capabilities import UnsupportedError
from backends.horovod_settings import HorovodSettings
from backends.registry import find_backend
from launch.options import read_options
from launch.resolve import settle
from tests.launching import horovod_has_mpi, lockstep, require_backend

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
    HorovodSettings().check_machine(start_method="horovodrun")
    monkeypatch.setenv(variable, "8")
    HorovodSettings().check_machine(start_method="horovodrun")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedError, match=f"{variable}={value}: is not a.* number; correct it, or unset it"):
        HorovodSettings().check_machine(start_method="horovodrun")
    options = ["--num-processes=2", "--device=cpu", "--task=token-tagging"]
    refused: list[str] = []
    asked = read_options("horovod", HorovodSettings, options)
    settle("horovod", find_backend("horovod"), asked, started_at=0.0, noted=refused)
    assert any(line.startswith(f"{variable}={value}: is not a") for line in refused), refused


@pytest.mark.parametrize(
    ("library", "is_refused"), [("a call of MPI_Allreduce", False), ("no call of it", True), (None, False)]
)
def test_open_mpi_starts_what_was_built_with_mpi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str | None, is_refused: bool
) -> None:
    """Where there is no Horovod at all, that is what is refused."""
    monkeypatch.setattr(horovod_settings, "package_directory", lambda name: tmp_path)
    (tmp_path / "torch").mkdir()
    if library is not None:
        (tmp_path / "torch" / "mpi_lib_v2.so").write_text(library)
    refused = pytest.raises(UnsupportedError, match=r"^--start-method mpirun: horovod was built without MPI; install")
    with refused if is_refused else nullcontext():
        HorovodSettings().check_machine(start_method="mpirun")
    HorovodSettings().check_machine(start_method="horovodrun")


def test_whether_it_was_built_with_mpi_is_what_it_says_itself() -> None:
    require_backend("horovod")
    refused = pytest.raises(UnsupportedError, match="was built without MPI")
    with nullcontext() if horovod_has_mpi() else refused:
        HorovodSettings().check_machine(start_method="mpirun")
