"""An adapter that cannot average float64: its cases run in float32, which the report says, and are judged by that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract.check import State
from contract.options import ContractOptions
from contract.suite import Result, Suite
from tests.forked.client import forked_job
from tests.launching import lockstep

pytestmark = pytest.mark.slow


def _results(adapter: str, directory: Path, checks: list[str]) -> list[Result]:
    options = ContractOptions(num_processes=[2], precision=["fp32"], check=checks)
    return list(Suite(f"tests.float32_only:{adapter}", directory, options, compose=forked_job).results())


def test_it_passes_in_float32_and_the_report_says_so(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ("--num-processes", "2", "--precision", "fp32", "--json", target)
    checks = [f"C{number:02}" for number in (*range(1, 4), *range(5, 43), *range(45, 51))]
    done = lockstep(
        "contract", "tests.float32_only:Float32OnlyBackend", *options, "--check", ",".join(checks), timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot average float64: its cases in float64 ran in float32" in done.stdout
    report = json.loads(target.read_text())
    assert report["float64"] is False
    states = {check["id"]: check["state"] for check in report["checks"]}
    assert states["C16"] == states["C17"] == states["C40"] == states["C45"] == "passed"


def test_without_the_declaration_it_fails(tmp_path: Path) -> None:
    (result,) = [one for one in _results("DishonestBackend", tmp_path, ["C18"]) if one.instance.case.name == "momentum"]
    assert result.state is State.FAILED
    assert "there is no float64 here" in result.reason


def test_the_rounding_of_float32_excuses_no_fault(tmp_path: Path) -> None:
    results = _results("SlightlyWrongBackend", tmp_path, ["C16"])
    assert {result.state for result in results} == {State.FAILED}
    assert any("within 0.0001 of the reference, saw a difference of 0.001" in result.reason for result in results)
