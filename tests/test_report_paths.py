"""What a report can be made of: records, races and results; and what is said of any other path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare.results import Results, read_results
from tests.launching import lockstep, train
from tests.made_races import NUM_STEPS, OPTIONS, made_race

SECONDS = {"single": 0.050, "ddp": 0.040}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("records")
    for name in SECONDS:
        train(name, directory / name, *OPTIONS)
    return {name: (directory / name / "record.json").read_text() for name in SECONDS}


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, str]) -> Path:
    directory = made_race(tmp_path_factory.mktemp("races") / "race", contents, SECONDS)
    (directory / "failed").mkdir()
    (directory / "failed" / "collectives-ddp.txt").write_text("collectives of ddp: out of luck\n")
    return directory


def _report(*arguments: str | Path, into: Path) -> Results:
    done = lockstep("report", *arguments, "--output-dir", into)
    assert done.returncode == 0, done.stderr
    return read_results(into / "results.json")


def test_the_directory_of_a_race_brings_what_the_race_knows(race: Path, tmp_path: Path) -> None:
    results = _report(race, into=tmp_path / "out")
    assert results.title == "Race of data-parallel backends"
    assert {entrant.num_runs for result in results.groups for entrant in result.entrants} == {3}
    assert any("apex" in problem for problem in results.problems)
    assert any("out of luck" in problem for problem in results.problems)
    assert results.commands["the race, and with it every figure"].startswith("launch/run.sh compare")
    assert results.commands["this report"].startswith("launch/run.sh report")
    assert results.facts["steps of each start"] == NUM_STEPS
    assert not any("starts" in name for name in results.facts)  # the first screen has the number of those that count
    assert _report(race, "--title", "Mine", into=tmp_path / "mine").title == "Mine"


def test_races_of_two_machines_make_one_report(race: Path, contents: dict[str, str], tmp_path: Path) -> None:
    other = made_race(tmp_path / "there", contents, SECONDS, change={"cpu": "Xeon", "boot_id": "another"})
    results = _report(race, other, into=tmp_path / "out")
    assert {result.group.machine for result in results.groups} == {"AMD EPYC, 2 cores", "Xeon, 2 cores"}
    assert any(problem.startswith("there: apex") for problem in results.problems)
    assert "race: the race, and with it every figure" in results.commands
    assert results.facts["there: steps of each start"] == NUM_STEPS


def test_results_are_rendered_again(race: Path, tmp_path: Path) -> None:
    first = _report(race, into=tmp_path / "first")
    again = _report(tmp_path / "first" / "results.json", into=tmp_path / "again")
    assert again == first
    for name in ("report.html", "report.md", "results.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert not (tmp_path / "again" / "steps.csv").exists()  # the steps of the runs are not in the results
    titled = _report(tmp_path / "first" / "results.json", "--title", "Mine", into=tmp_path / "titled")
    assert titled == first.model_copy(update={"title": "Mine"})


def test_other_paths_are_named_with_what_to_give_instead(race: Path, contents: dict[str, str], tmp_path: Path) -> None:
    _report(race, into=tmp_path / "made")
    results = tmp_path / "made" / "results.json"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(contents["ddp"])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.json").write_text(contents["ddp"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "plan.json").write_text('{"schema_version": 1}')
    newer = json.loads(results.read_text()) | {"schema_version": 7}
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    for paths, complaint in (
        ([tmp_path / "run"], f"is the directory of a run; give its record, {tmp_path / 'run' / 'record.json'}"),
        ([tmp_path / "made"], f"is the directory of a report; give {results}"),
        ([race / "records"], f"belongs to a race; give the directory of the race, {race}"),
        ([race / "plan.json"], f"is the plan of a race; give its directory, {race}"),
        ([tmp_path / "files"], f"give the files in it: {tmp_path / 'files'}/*.json"),
        ([tmp_path / "empty"], "holds no race, no run and no report; give records of runs"),
        ([tmp_path / "old"], "plan.json is not the plan of a race of this version of Lockstep; give the records"),
        ([tmp_path / "made" / "report.html"], "is a page, not what a report is made of; give records"),
        ([tmp_path / "made" / "steps.csv"], "is a page, not what a report is made of; give records"),
        ([results, race], "cannot be put together with other files; give it alone"),
        ([tmp_path / "newer.json"], "is not a results.json of this version (schema_version: Input should be 1)"),
        ([results, "--target-accuracy", "0.5"], "--target-accuracy: cannot be changed"),
        (["/dev/null"], "is not a file; give records"),
        (["nowhere"], "cannot be read (No such file or directory); give records"),
        ([race, race], "the same run"),
    ):
        done = lockstep("report", *paths, "--output-dir", tmp_path / "out")
        assert done.returncode == 2, (paths, done.stderr)
        assert complaint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()
