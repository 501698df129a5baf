"""What `launch/run.sh` refuses before Python runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.place import Place, content_of, run

RUN_SH = Path(__file__).parent.parent.parent / "launch" / "run.sh"


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """A directory with interpreters that behave as Python 3.9 does in the check of versions."""
    for name in ("python", "python3", "python3.10", "python3.11", "python3.12", "python3.13"):
        stub = tmp_path / name
        stub.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18 && exit\nexit 1\n')
        stub.chmod(0o755)
    return tmp_path


def test_script_refuses_an_old_python(place: Place, old_python: Path) -> None:
    python, venv = str(old_python / "python3"), str(place.work / "venv")
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", PYTHON=python, LOCKSTEP_VENV=venv)
        outcome.assert_refused(f"PYTHON={python} is Python 3.9.18", "needs Python 3.10 to 3.13")


def test_script_refuses_a_missing_python(place: Place) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", PYTHON="/nowhere/python", LOCKSTEP_VENV=str(place.work / "venv"))
        outcome.assert_refused("PYTHON=/nowhere/python", "needs Python 3.10 to 3.13")


def test_script_finds_only_old_pythons(place: Place, old_python: Path) -> None:
    path, venv = f"{old_python}:{place.environment['PATH']}", str(place.work / "venv")
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "doctor", PATH=path, LOCKSTEP_VENV=venv)
        outcome.assert_refused("python3 is Python 3.9.18", "no Python 3.10 to 3.13 on PATH", "PYTHON=")


def test_script_refuses_an_old_environment(place: Place, old_python: Path) -> None:
    (old_python / "bin").mkdir()
    (old_python / "python").rename(old_python / "bin" / "python")
    before = content_of(old_python)
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", LOCKSTEP_VENV=str(old_python))
        outcome.assert_refused(f"{old_python} has Python 3.9.18", "needs 3.10 to 3.13", "LOCKSTEP_VENV")
    assert content_of(old_python) == before


@pytest.mark.parametrize("backend", ["dpd", "--num-processes", "ddp.py"])
def test_script_refuses_an_unknown_backend(place: Place, backend: str) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, backend, LOCKSTEP_VENV=str(place.work / "venv"))
        outcome.assert_refused(
            f"'{backend}'",
            "choose a backend (single dp ddp fsdp2 apex horovod accelerate fabric deepspeed) or contract, verify, "
            "compare, report, allreduce, forecast, doctor",
        )


def test_script_wants_an_activated_environment(place: Place) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", LOCKSTEP_VENV="active")
        outcome.assert_refused("LOCKSTEP_VENV=active", "no virtual environment is activated")
