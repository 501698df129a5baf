"""The command that holds the estimates of races against what these take, without any race."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import estimates

# Prints what a race of two runs prints that takes no time, or what its dry run does.
RACE = """
import sys
if "one rank" in sys.argv:
    sys.exit("lockstep: --budget 3min: is too small")
print("taking a few steps to see how long the race will take")
print("race of 2 entrants, each started about 5 times, as time allows, for 300 steps: about 3min; results go to here")
if "--dry-run" not in sys.argv:
    print("[1/2] about 88s left")
    print("[2/2] about 28s left")
    print("measuring the collectives of ddp on 2 ranks: about 28s")
sys.exit(1 if "whole runs" in sys.argv and "--dry-run" not in sys.argv else 0)
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("each started about 5 times, as time allows, for 300 steps: about 3min, estimated from a few steps", 180),
        ("[1/12] about 90s left", 90),
        ("each started 3 times", None),
        ("about 5 minutes", None),
    ],
)
def test_durations_are_read_as_a_race_writes_them(text: str, seconds: float | None) -> None:
    assert estimates.seconds_in(text) == seconds


def test_a_race_of_each_kind_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(estimates, "KINDS", {kind: (kind,) for kind in ("two entrants", "one rank", "whole runs")})
    monkeypatch.setattr(estimates, "command_of", lambda options, *_: [sys.executable, "-c", RACE, *options])
    estimates.main([str(tmp_path)])
    headings, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    )
    assert headings == list(estimates._HEADINGS)
    assert all(len(row) == len(headings) for row in rows)
    plain, refused, failed = rows
    assert plain[:2] == ["two entrants", "180"]
    assert float(plain[2]) == pytest.approx(88, abs=30)
    assert refused[:2] == ["one rank", "refused: lockstep: --budget 3min: is too small"]
    assert failed[:2] == ["whole runs", "refused: it ended with exit code 1"]


def test_races_that_are_there_already_are_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "one-rank").mkdir()
    with pytest.raises(SystemExit) as ended:
        estimates.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "one-rank: is there already; name another directory" in capsys.readouterr().err


def test_what_a_race_took_stands_beside_both_estimates() -> None:
    assert estimates.Taken(180, 150, 165).cells() == ["180", "150", "165", "0.92", "1.10"]
    assert estimates.Taken(180, None, 90).cells() == ["180", "-", "90", "0.50", "-"]
