"""Which runs of a race that was interrupted are repeated, and who is not started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.race import run as race_module
from compare.race.directory import RaceDirectory
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, PlannedRun, RacePlan, Schedule, draw_plan
from compare.race.run import _able, _ends_early
from compare.report.runs import race_file
from records.files import write_atomically


def _heat(block: int = 1) -> list[PlannedRun]:
    entrants = [
        Entrant(backend=name, num_processes=1, precision="fp32", accumulation=1, global_batch_size=32)
        for name in ("single", "ddp")
    ]
    return [PlannedRun(entrant=who, purpose="timed", block=block, position=0) for who in entrants]


def _leave(directory: RaceDirectory, heat: list[PlannedRun], left: tuple[str, ...]) -> None:
    for run, what in zip(heat, left, strict=True):
        file = {"record": directory.record(run), "failure": directory.failed / run.name / "why.txt"}.get(what)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


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
    _leave(directory, heat, left)
    assert directory.is_over(heat) == is_over
    directory.forget(heat)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("blocks", "able"),
    [
        ([("record", "failure")], ["single", "ddp"]),
        ([("record", "failure"), ("record", "failure")], ["single"]),
        ([("record", "failure"), ("record", "record"), ("record", "failure")], ["single", "ddp"]),
        # Where all fail, it may be due to the machine.
        ([("failure", "failure"), ("failure", "failure")], ["single", "ddp"]),
    ],
)
def test_who_fails_twice_beside_others_is_not_started_again(
    tmp_path: Path, blocks: list[tuple[str, str]], able: list[str]
) -> None:
    directory, runs = RaceDirectory(tmp_path), []
    for block, left in enumerate(blocks, start=1):
        heat = _heat(block)
        _leave(directory, heat, left)
        runs += heat
    heat = _heat(len(blocks) + 1)
    assert [run.entrant.backend for run in _able(heat, [*runs, *heat], directory)] == able


def test_who_is_given_up_is_named_until_its_last_start_is_repeated(tmp_path: Path) -> None:
    directory, (_, run) = RaceDirectory(tmp_path), _heat(block=4)
    _leave(directory, [run], ("failure",))
    sentence = directory.give_up(run, "it failed 2 times in a row")
    assert sentence == "ddp, 1 rank(s), fp32, 32 x 1 is not started again after block 4: it failed 2 times in a row"
    directory.leave_out(_heat(block=5)[1])
    assert directory.failures() == [sentence]
    directory.forget([run])
    assert directory.failures() == []


def test_who_is_in_all_parts_of_a_block_is_started_again(tmp_path: Path) -> None:
    """The parts could not be compared without it."""
    directory, runs = RaceDirectory(tmp_path), []
    for block in (1, 2, 3):
        for part, left in enumerate([("failure", "record"), ("failure", "record")]):
            heat = [run.model_copy(update={"heat": part}) for run in _heat(block)]
            _leave(directory, heat, left)
            runs += heat if part == 0 else heat[:1]
    assert [run.entrant.backend for run in _able(_heat(4), runs, directory)] == ["single", "ddp"]


def test_a_race_does_not_wait_to_know_more_of_who_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its starts left, completed or failed, does not count."""
    directory, heats = RaceDirectory(tmp_path), [_heat(block) for block in (1, 2, 3, 4)]
    for heat, left in zip(heats[:3], [("record", "record"), ("record", "failure"), ("record", "failure")], strict=True):
        _leave(directory, heat, left)
        for run in heat:
            if (directory.failed / run.name).exists():
                directory.record_of_failure(run).touch()
    counted: list[Path] = []

    def is_decided(directory: RaceDirectory, within: float, *, without: list[Path]) -> bool:
        counted.extend(set(directory.records()) - set(without))
        return True

    monkeypatch.setattr(race_module, "is_decided", is_decided)
    plan = RacePlan(
        schema_version=8,
        options=RaceOptions(until="1%", diagnosis=False),
        schedule=Schedule(repeats=4, most_repeats=4, timed_steps=100, seconds=0.0),
        costs=None,
        entrants=[run.entrant for run in heats[0]],
        run_options=[],
        diagnosis_options=[],
        left_out=[],
        command="",
        race="",
    )
    assert _ends_early(plan, 4, [run for heat in heats for run in heat], directory)
    assert sorted(counted) == sorted(directory.record(heat[0]) for heat in heats[:3])


def test_entrants_with_long_names_leave_files_of_their_own(tmp_path: Path) -> None:
    entrants = [
        Entrant(
            backend="tests.variants_of_ddp:StrayingDDP",
            num_processes=1024,
            precision="fp32",
            accumulation=1024,
            global_batch_size=2**40,
            variant=300 * "x" + last,
        )
        for last in "ab"
    ]
    runs = [run.model_copy(update={"heat": 12}) for run in draw_plan(entrants, RaceOptions(), repeats=3)]
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        write_atomically(tmp_path / race_file(RaceDirectory(tmp_path).record(run)).name, "")
