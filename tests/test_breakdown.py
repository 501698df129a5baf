"""Where the time of a step goes: what is planted in a phase is found there, and noise is called noise."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from compare.numbers import number, part_of_step
from compare.report.breakdown import _SMALLEST_PART, measure_breakdown
from compare.report.statistics import median_bounds
from compare.steps import Breakdown, parts_in
from records.record import DiagnosisRecord, RankRecord, RunRecord, StepRecord, read_record
from records.throughput import NUM_WARMUP_STEPS
from tests.launching import lockstep
from tests.planted import PLACES, TEXTS, SlowRank, breakdown, diagnosed, own_clock

# Many times what a step takes, so that a machine with other work does not matter.
SECONDS = 0.04
OPTIONS: dict[str, Any] = {"micro_batch_size": 16, "global_batch_size": 16, "max_steps": 16}


@pytest.fixture(scope="module")
def undisturbed() -> Breakdown:
    return breakdown(None, 0.0, "token-tagging", **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_what_is_planted_in_a_phase_is_found_there(place: str, undisturbed: Breakdown) -> None:
    found = breakdown(place, SECONDS, "token-tagging", **OPTIONS)
    more = {part: getattr(found, part) - getattr(undisturbed, part) for part in parts_in([found])}
    assert 0.8 * SECONDS < more.pop(PLACES[place]) < 2 * SECONDS
    assert all(abs(seconds) < SECONDS / 2 for seconds in more.values()), more


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "forward"])
def test_the_others_wait_for_a_slow_rank(phase: str, tmp_path: Path) -> None:
    options = ["--task", "tests.planted:SlowRank", "--max-steps", "14", "--output-dir", tmp_path / "run"]
    done = lockstep("ddp", *options, "--diagnose", env={"LOCKSTEP_TEST_SLOW_PHASE": phase})
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "record.json")
    assert all(rank.diagnosis and len(rank.diagnosis.rehearsed_seconds) == 14 for rank in record.ranks)
    fast, slow = (_medians(rank.diagnosis) for rank in record.ranks if rank.diagnosis is not None)
    assert fast["communication"] > 0.8 * SlowRank.SECONDS
    assert slow[phase] > 0.8 * SlowRank.SECONDS
    assert max(fast[phase], slow["communication"]) < SlowRank.SECONDS / 2
    found = measure_breakdown(record, {}, None)
    assert found is not None
    assert found.tells_waiting
    # One of two waits, for as long as the other sleeps: longer than it asked for where the cores are busy.
    assert 0.4 * SlowRank.SECONDS < found.resolved("waiting") < 1.2 * getattr(found, phase)
    assert found.communication < SlowRank.SECONDS / 4


def _medians(seen: DiagnosisRecord) -> dict[str, float]:
    parts = {"data": seen.data_seconds, **seen.alone_seconds}
    sums = [sum(one) for one in zip(*parts.values(), strict=True)]
    parts["communication"] = [whole - rest for whole, rest in zip(seen.whole_seconds, sums, strict=True)]
    return {name: median(seconds[NUM_WARMUP_STEPS:]) for name, seconds in parts.items()}


def _run(communication: list[float], building: float = 0.0) -> RunRecord:
    """A run of one rank whose steps compute for 100 ms; the first steps, which are left out, take much longer."""
    warmup = [9.0] * NUM_WARMUP_STEPS
    constant = {name: [*warmup, *[seconds] * len(communication)] for name, seconds in _COMPUTING.items()}
    seen = DiagnosisRecord.model_construct(
        whole_seconds=[*warmup, *(0.1 + seconds for seconds in communication)],
        data_seconds=constant.pop("data"),
        first_seconds=[*warmup, *[0.07 + building] * len(communication)],
        alone_seconds=constant,
        num_reductions=[1],
    )
    step = StepRecord.model_construct()
    num_steps = len(warmup) + len(communication)
    return RunRecord.model_construct(steps=[step] * num_steps, ranks=[RankRecord.model_construct(diagnosis=seen)])


_COMPUTING = {"data": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.02}


def test_parts_add_up_to_the_step() -> None:
    # The longest steps of the diagnosis were long in the race, too, and three of them were not timed.
    timed = {NUM_WARMUP_STEPS + number: (0.179 + 0.001 * number) / 1.25 for number in range(4, 12)}
    found = measure_breakdown(
        _run([0.05 + 0.001 * number for number in range(11)], building=0.03), timed, step_seconds=0.16
    )
    assert found is not None
    # The diagnosis took a quarter longer than the same steps of the race, whose median step is another one.
    assert found.overhead == pytest.approx(0.25)
    assert found.total == pytest.approx(0.16)
    assert found.communication == pytest.approx(0.055 * 0.16 / 0.185)
    assert found.building == pytest.approx(0.03 * 0.16 / 0.185)
    assert found.unresolved == {}
    assert part_of_step(found, "communication", 3) == "47.6"


def _ranks(seconds: list[list[float]], seconds_again: list[list[float]]) -> RunRecord:
    """A run whose ranks take so long alone, and likewise before; beyond that, each step takes 50 ms."""
    run = _run([0.05] * len(seconds[0]))
    slowest = [max(of_step) for of_step in zip(*seconds, strict=True)]
    ranks = []
    for own, again in zip(seconds, seconds_again, strict=True):
        (rank,) = _run([0.05] * len(own)).ranks
        assert rank.diagnosis is not None
        # What is not backward takes 30 ms before the update, and 20 ms after it.
        rank.diagnosis.alone_seconds["backward"][NUM_WARMUP_STEPS:] = [one - 0.03 for one in own]
        rank.diagnosis.whole_seconds[NUM_WARMUP_STEPS:] = [one + 0.02 + 0.05 for one in slowest]
        rank.diagnosis.rehearsed_seconds = [9.0] * NUM_WARMUP_STEPS + again
        ranks.append(rank)
    return run.model_copy(update={"ranks": ranks})


def test_the_mean_rank_waits_until_the_slowest_comes_to_its_update() -> None:
    seconds = [[0.08] * 12, [0.1] * 12]
    found = measure_breakdown(_ranks(seconds, seconds), {}, None)
    assert found is not None
    assert found.waiting == pytest.approx(0.01)
    assert found.communication == pytest.approx(0.05)
    assert found.total == pytest.approx(0.17)
    (rank, _) = (run := _ranks(seconds, seconds)).ranks
    assert rank.diagnosis is not None
    rank.diagnosis.rehearsed_seconds = []  # as in older records
    found = measure_breakdown(run, {}, None)
    assert found is not None
    assert (found.waiting, found.communication) == (None, pytest.approx(0.06))


def test_noise_is_not_called_waiting() -> None:
    """The slower of two ranks is so by noise: it is another one each time."""
    random = np.random.default_rng(0)
    first, again = random.normal(0.08, 0.008, (2, 2, 60)).tolist()
    found = measure_breakdown(_ranks(first, again), {}, None)
    assert found is not None
    assert not found.tells_waiting
    assert found.resolved("waiting") == 0
    assert 0.002 < found.unresolved["waiting"] < 0.01
    assert found.communication == pytest.approx(0.05 + 0.0045, abs=0.001)


@pytest.mark.parametrize(
    ("communication", "at_most"),
    [
        ([-0.02, 0.03] * 6, 0.03),  # as often below zero as above
        ([0.0005] * 12, _SMALLEST_PART * 0.1),  # always there, but less than the method can promise
        ([-0.004] * 12, _SMALLEST_PART * 0.1),
        ([-0.01, 0.04, 0.05, 0.06, 0.05], 0.06),  # too few steps to leave one of them out
    ],
)
def test_what_noise_may_have_made_is_called_noise(communication: list[float], at_most: float) -> None:
    found = measure_breakdown(_run(communication), {}, None)
    assert found is not None
    assert found.unresolved["communication"] == pytest.approx(at_most, rel=0.05)
    assert found.total == pytest.approx(0.1 + median(communication))
    assert (
        part_of_step(found, "communication") == f"noise, at most {number(1e3 * found.unresolved['communication'], 2)}"
    )


def test_too_few_steps_have_no_breakdown() -> None:
    assert measure_breakdown(_run([]), {}, None) is None


@pytest.mark.parametrize(("communication", "covered"), [(0.05, 1.0), (0.0005, 0.1 / 0.1005)], ids=["told", "noise"])
def test_a_breakdown_says_how_much_of_the_step_its_parts_are(communication: float, covered: float) -> None:
    """What is not told from noise is missing in them."""
    found = measure_breakdown(_run([communication] * 12), {}, None)
    assert found is not None
    assert found.covered == pytest.approx(covered)


@pytest.mark.slow
def test_the_parts_of_one_process_are_its_whole_steps() -> None:
    """Within 3 %, beyond what noise may make of them: the method itself may put 2 % into a step."""
    with own_clock():
        run = diagnosed(None, 0.0, **TEXTS, max_steps=45)
    (seen,) = (rank.diagnosis for rank in run.ranks)
    assert seen is not None
    parts = zip(seen.data_seconds, *seen.alone_seconds.values(), strict=True)
    shares = [sum(of_step) / whole for of_step, whole in zip(parts, seen.whole_seconds, strict=True)]
    low, high = median_bounds(shares[NUM_WARMUP_STEPS:])
    assert low < 1.03
    assert high > 0.97
    found = measure_breakdown(run, {}, None)
    assert found is not None
    # Were communication told from noise, this would be near 1 by construction; the shares are without it in any case.
    assert found.covered == pytest.approx(1, abs=0.03 + (high - low) / 2)
