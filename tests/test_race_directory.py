"""Which runs of a race that was interrupted are repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.race.directory import RaceDirectory
from compare.race.plan import Entrant, PlannedRun


def _heat() -> list[PlannedRun]:
    entrants = [
        Entrant(backend=name, num_processes=1, precision="fp32", accumulation=1, global_batch_size=32)
        for name in ("single", "ddp")
    ]
    return [PlannedRun(entrant=who, purpose="timed", block=1, position=0) for who in entrants]


@pytest.mark.parametrize(
    ("left", "is_over"),
    [
        (("record", "record"), True),
        (("record", "failure"), True),
        (("record", "nothing"), False),  # the race was killed while it kept what they left
        (("failure", "failure"), False),
        (("nothing", "nothing"), False),
    ],
)
def test_a_heat_is_over_when_all_have_ended_and_one_has_completed(
    tmp_path: Path, left: tuple[str, str], is_over: bool
) -> None:
    directory, heat = RaceDirectory(tmp_path), _heat()
    for run, what in zip(heat, left, strict=True):
        file = {"record": directory.record(run), "failure": directory.failed / run.name / "why.txt"}.get(what)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    assert directory.is_over(heat) == is_over
    directory.forget(heat)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
