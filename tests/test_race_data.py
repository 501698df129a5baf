"""steps.csv: what it holds, what its page says of it, and that the page's example is true."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compare.report.tidy import StepRow
from compare.results import Results, read_results
from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import lockstep, train
from tests.made_races import NUM_STEPS, OPTIONS, STARTS, made_race

PAGE = (PROJECT_DIRECTORY / "docs" / "race-data.md").read_text()
SECONDS = {"single": 0.050, "ddp": 0.040}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    contents = {}
    for name in SECONDS:
        train(name, directory / name, *OPTIONS)
        contents[name] = (directory / name / "record.json").read_text()
    done = lockstep("report", made_race(directory / "race", contents, SECONDS), "--output-dir", directory / "report")
    assert done.returncode == 0, done.stderr
    assert "steps.csv" in done.stdout
    return directory / "report"


@pytest.fixture(scope="module")
def rows(report: Path) -> list[dict[str, str]]:
    with (report / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def results(report: Path) -> Results:
    return read_results(report / "results.json")


def test_the_page_describes_every_column_in_its_order(rows: list[dict[str, str]]) -> None:
    described = re.findall(r"(?m)^\| `(\w+)` \|", PAGE)
    assert described == list(rows[0]) == list(StepRow._fields)


def test_there_is_a_row_for_each_step_and_rank(rows: list[dict[str, str]], results: Results) -> None:
    assert len(rows) == NUM_STEPS * len(STARTS) * (1 + 2)
    keys = {(row["run"], row["rank"], row["step"]) for row in rows}
    assert len(keys) == len(rows)
    entrants = {(result.group.key, entrant.name) for result in results.groups for entrant in result.entrants}
    assert {(row["group"], row["entrant"]) for row in rows} == entrants
    assert {row["machine"] for row in rows} == {"AMD EPYC, 2 cores"}
    assert {row["run"] for row in rows} >= {"timed-001-00-ddp", "timed-003-00-single"}


def test_a_row_says_whether_the_step_was_timed_and_in_which_turn(rows: list[dict[str, str]]) -> None:
    steps = [row for row in rows if row["run"] == "timed-002-00-ddp" and row["rank"] == "0"]
    assert [row["timed"] for row in steps] == [str(step in (7, 8, 10, 11, 12)).lower() for step in range(1, 13)]
    assert [row["round"] for row in steps] == ["0"] * 5 + ["1"] * 3 + ["2"] * 4
    assert [row["position"] for row in steps] == ["0"] * 5 + ["1"] * 3 + ["0"] * 4
    assert [row["joint_seconds"] != "" for row in steps] == [
        step in (2, 3, 4, 5, 7, 8, 10, 11, 12) for step in range(1, 13)
    ]
    assert {row["block"] for row in steps} == {"2"}
    assert {row["part"] for row in steps} == {"0"}
    assert {row["foreign_share"] for row in steps[5:8]} == {"0.01"}


def test_samples_per_second_follow_from_the_rows(rows: list[dict[str, str]], results: Results) -> None:
    (ddp,) = [entrant for result in results.groups for entrant in result.entrants if entrant.name == "ddp"]
    timed = [row for row in rows if row["run"] == "timed-001-00-ddp" and row["timed"] == "true"]
    samples = sum(int(row["samples"]) for row in timed)
    seconds = sum(float(row["joint_seconds"]) for row in timed if row["rank"] == "0")
    assert samples / seconds == pytest.approx(ddp.samples_per_second_of_runs[0])


def test_the_example_of_the_page_is_true(report: Path, results: Results) -> None:
    (example,) = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    assert len(example.strip().splitlines()) <= 10
    printing = "\nfor (group, entrant), value in medians.items(): print(repr((group, entrant, float(value))))\n"
    done = subprocess.run([sys.executable, "-c", example + printing], cwd=report, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [eval(line) for line in done.stdout.splitlines() if line.startswith("(")]
    expected = {
        (result.group.key, entrant.name): entrant.median_step_seconds
        for result in results.groups
        for entrant in result.entrants
    }
    assert {(group, entrant): value for group, entrant, value in found} == pytest.approx(expected)
