"""The gate as a command: its exit codes, its output, the options that it refuses, and a real race with a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare.results import read_results
from tests.launching import lockstep, train
from tests.made_races import OPTIONS, made_race

SECONDS = {"single": 0.050, "ddp": 0.040}


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A race, and one in which ddp is slower by a tenth; both in the same few seconds of a machine."""
    directory = tmp_path_factory.mktemp("races")
    contents = {}
    for name in SECONDS:
        train(name, directory / name, *OPTIONS)
        contents[name] = (directory / name / "record.json").read_text()
    done = lockstep("report", made_race(directory / "then", contents, SECONDS), "--output-dir", directory / "then")
    assert done.returncode == 0, done.stderr
    made_race(directory / "same", contents, {"single": 0.0501, "ddp": 0.0402})
    made_race(directory / "slower", contents, {"single": 0.050, "ddp": 0.040 * 1.25})
    made_race(directory / "moved", contents, SECONDS, change={"cpu": "Xeon"})
    return {name: directory / name for name in ("then", "same", "slower", "moved")}


def test_the_exit_code_of_a_report_says_whether_it_passes(races: dict[str, Path], tmp_path: Path) -> None:
    baseline = ["--baseline", races["then"] / "results.json"]
    done = lockstep("report", races["same"], *baseline, "--fail-above", "5%", "--output-dir", tmp_path / "same")
    assert done.returncode == 0, done.stderr
    assert "PASSED" in done.stdout
    done = lockstep("report", races["slower"], *baseline, "--fail-above", "5%", "--output-dir", tmp_path / "slower")
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("FAILED") == 1
    assert "FAILED: ddp (2 ranks" in " ".join(done.stdout.split())
    gate = read_results(tmp_path / "slower" / "results.json").gate
    assert gate is not None
    assert [row.status for row in gate.rows] == ["slower", "passed"]
    assert "Compared with the baseline" in (tmp_path / "slower" / "report.md").read_text()
    assert "Compared with the baseline" in (tmp_path / "slower" / "report.html").read_text()
    again = lockstep("report", tmp_path / "slower" / "results.json", "--output-dir", tmp_path / "again")
    assert again.returncode == 3  # what was found is still true
    done = lockstep("report", races["moved"], *baseline, "--output-dir", tmp_path / "moved")
    assert done.returncode == 2
    assert "it is of another machine (AMD EPYC, 2 cores, not Xeon, 2 cores)" in done.stderr
    assert not (tmp_path / "moved").exists()
    done = lockstep("report", races["moved"], *baseline, "--allow-other-baseline", "--output-dir", tmp_path / "moved")
    assert done.returncode == 0, done.stderr
    assert "used although it is of another machine" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--baseline", "none.json"], "--baseline none.json: cannot be read"),
        (["--baseline", ""], "--baseline: is empty; name a path"),
        (["--baseline", "good.json", "--fail-above", "0"], "--fail-above 0: is not a percentage; write it as 3% or"),
        (["--baseline", "good.json", "--fail-above", "0%"], "--fail-above 0%: should be greater than 0"),
        (["--baseline", "good.json", "--fail-above", "x"], "--fail-above x: is not a percentage"),
        (["--baseline", "good.json", "--fail-above", "300%"], "--fail-above 300%: should be less than or equal to 1"),
        (["--fail-above", "3%"], "--fail-above: needs a baseline; add --baseline results.json"),
        (["--allow-other-baseline"], "--allow-other-baseline: needs a baseline"),
    ],
)
def test_bad_options_of_a_gate_end_with_one_line(
    command: str, options: list[str], complaint: str, races: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "good.json").write_bytes((races["then"] / "results.json").read_bytes())
    paths = [str(races["same"])] if command == "report" else ["--backends", "single", "--task", "token-tagging"]
    done = lockstep(command, *paths, *options, "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good.json"]


def test_a_race_that_cannot_be_compared_does_not_begin(races: dict[str, Path], tmp_path: Path) -> None:
    common = ["--task", "token-tagging", "--global-batch-size", "16", "--threads-per-rank", "1"]
    for options, complaint in (
        (["--backends", "single", "--num-processes", "1"], "has ddp (2 ranks"),
        (["--backends", "single,ddp", "--num-processes", "2"], "it is of another machine"),
        (
            ["--backends", "single,ddp", "--num-processes", "2", "--no-diagnosis"],
            "--no-diagnosis: --baseline also asks",
        ),
    ):
        arguments = [*common, *options, "--baseline", races["then"] / "results.json", "--output-dir", tmp_path / "out"]
        done = lockstep("compare", *arguments)
        assert done.returncode == 2, done.stderr
        assert complaint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_race_is_compared_with_an_earlier_one(tmp_path: Path) -> None:
    options = ["compare", "--backends", "single", "--num-processes", "1", "--task", "token-tagging", "--no-limits"]
    options += ["--global-batch-size", "16", "--diagnosis-steps", "10", "--no-collectives", "--no-wait-for-idle"]
    first = lockstep(*options, "--timed-steps", "12", "--repeats", "3", "--output-dir", tmp_path / "then")
    assert first.returncode == 0, first.stderr
    file = tmp_path / "then" / "results.json"
    done = lockstep(*options, "--baseline", file, "--output-dir", tmp_path / "now")
    results = read_results(tmp_path / "now" / "results.json")
    assert results.gate is not None
    # Beside other programs, the machine may have been many times slower meanwhile.
    assert done.returncode == (0 if results.gate.passed else 3), done.stderr + done.stdout
    assert results.facts["steps of each start"] == 12
    assert results.gate.differences == []
    assert results.gate.rows[0].change is not None
    faster = json.loads(file.read_text())
    for result in faster["groups"]:
        for entrant in result["entrants"]:
            entrant["samples_per_second_of_runs"] = [1e6 * rate for rate in entrant["samples_per_second_of_runs"]]
    (tmp_path / "faster.json").write_text(json.dumps(faster))
    gate = ["--baseline", tmp_path / "faster.json", "--output-dir", tmp_path / "report"]
    done = lockstep("report", tmp_path / "now", *gate)
    assert done.returncode == 3, done.stderr
