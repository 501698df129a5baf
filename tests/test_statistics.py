"""The statistics of a race: tried on numbers with known answers, and on real runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from compare.report.statistics import SMALLEST_CLAIM, compare_pairs, detectable_difference, mean_interval
from compare.results import Comparison
from launch.engines.interface import PROJECT_DIRECTORY
from tests.variants_of_ddp import PLANTED_SLOWDOWN

NUM_RACES = 40
BLOCKS_OF_A_RACE = 7


def _compare(ratios: list[float], *, num_comparisons: int = 1) -> Comparison:
    return compare_pairs("a", "b", [[(1.0, ratio)] for ratio in ratios], num_comparisons=num_comparisons)


def test_an_interval_is_students_on_the_logarithms() -> None:
    """Worked by hand: logs 0.02, 0.04, 0.06 have mean 0.04, error 0.02 / sqrt 3; t(0.975, 2) = 4.30265."""
    interval = _compare([math.exp(x) for x in (0.02, 0.04, 0.06)]).slowdown
    assert interval is not None
    half = 4.30265 * 0.02 / math.sqrt(3)
    assert interval.estimate == pytest.approx(math.expm1(0.04))
    assert interval.low == pytest.approx(math.expm1(0.04 - half), rel=1e-4)
    assert interval.high == pytest.approx(math.expm1(0.04 + half), rel=1e-4)


def test_more_comparisons_widen_each_interval() -> None:
    ratios = [1.02, 1.04, 1.06, 1.03]
    alone, among_ten = _compare(ratios).slowdown, _compare(ratios, num_comparisons=10).slowdown
    assert alone is not None
    assert among_ten is not None
    assert among_ten.low < alone.low < alone.high < among_ten.high  # type: ignore[operator]


def test_a_clear_difference_is_claimed_in_words() -> None:
    slower = _compare([1.10, 1.11, 1.09, 1.10, 1.10])
    assert slower.claim == "slower"
    assert slower.text.startswith("b is 10.0 % slower than a [")
    faster = _compare([1 / 1.10, 1 / 1.11, 1 / 1.09, 1 / 1.10, 1 / 1.10])
    assert faster.claim == "faster"
    assert faster.text.startswith("a is 10.0 % slower than b [")
    assert slower.text.split("[")[1] == faster.text.split("[")[1]


def test_a_difference_within_a_percent_is_never_claimed() -> None:
    exact = [1 + SMALLEST_CLAIM / 2] * 5
    assert _compare(exact).claim == "none"


def test_noise_is_no_difference_and_asks_for_more() -> None:
    noisy = _compare([0.9, 1.1, 0.95, 1.12, 0.97])
    assert noisy.claim == "none"
    assert noisy.more_repeats is not None
    assert noisy.more_repeats > 0
    assert f"{noisy.more_repeats} more repeats" in noisy.text
    assert "smallest detectable: " in noisy.text


def test_too_few_pairs_say_nothing() -> None:
    few = _compare([2.0, 2.0])
    assert few.claim == "too few"
    assert few.slowdown is None
    assert "1 more needed" in few.text


def test_the_detectable_difference_is_detected_in_four_races_of_five() -> None:
    deviation, num_pairs = 0.03, 7
    planted = math.log1p(detectable_difference(deviation, num_pairs))
    random = np.random.default_rng(0)
    claims = [
        _compare(list(np.exp(random.normal(planted, deviation, num_pairs)))).claim == "slower" for _ in range(1000)
    ]
    assert 0.75 < np.mean(claims) < 0.9


def test_intervals_of_normal_logarithms_cover() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        interval = _compare(list(np.exp(random.normal(0.05, 0.03, 5)))).slowdown
        assert interval is not None
        covered += interval.low <= math.expm1(0.05) <= interval.high  # type: ignore[operator]
    assert 0.93 < covered / 1000 < 0.97


def test_the_turns_of_a_start_count_once_and_their_spread_is_a_floor() -> None:
    """Starts that agree by chance do not hide that their turns differ; a turn that was disturbed does not matter."""
    turns = [(1.0, ratio) for ratio in (1.0, 1.1) * 10]
    agreeing = compare_pairs("a", "b", [turns] * 4, num_comparisons=1).slowdown
    assert agreeing is not None
    half = 3.18245 * np.log([ratio for _, ratio in turns]).std(ddof=1) / math.sqrt(len(turns) * 4)  # t(0.975, 3)
    assert math.log1p(agreeing.high) - math.log1p(agreeing.low) == pytest.approx(2 * half, rel=1e-4)  # type: ignore[arg-type]
    calm = [(1.0, 1.05)] * 19
    disturbed = compare_pairs("a", "b", [[*calm, (1.0, 50.0)]] * 4, num_comparisons=1).slowdown
    assert disturbed is not None
    assert disturbed.estimate == pytest.approx(0.05)


def test_a_mean_of_one_run_has_no_interval() -> None:
    assert mean_interval([5.0]).low is None
    both = mean_interval([4.0, 9.0])
    assert both.estimate == pytest.approx(6.0)
    assert both.low is not None
    assert 0 < both.low < 4.0


def _real_blocks(first: str, second: str) -> list[tuple[float, float]]:
    """Seconds per step of real runs, by block: tests/calibration.py made them."""
    (path,) = sorted((PROJECT_DIRECTORY / "docs" / "results").glob("calibration-*.json"))[-1:]
    seconds = json.loads(path.read_text())["seconds_per_step"]
    return list(zip(seconds[first], seconds[second], strict=True))


def _claims(blocks: list[tuple[float, float]]) -> list[str]:
    """Of races that each drew some of the real blocks."""
    random = np.random.default_rng(0)
    return [
        compare_pairs(
            "a",
            "b",
            [[blocks[index]] for index in random.choice(len(blocks), BLOCKS_OF_A_RACE, replace=False)],
            num_comparisons=1,
        ).claim
        for _ in range(NUM_RACES)
    ]


def test_a_backend_against_itself_differs_in_few_real_races() -> None:
    claims = _claims(_real_blocks("ddp", "same"))
    assert sum(claim != "none" for claim in claims) <= 0.05 * NUM_RACES


def test_a_planted_slowdown_is_found_in_most_real_races() -> None:
    blocks = _real_blocks("ddp", "slowed")
    claims = _claims(blocks)
    assert sum(claim == "slower" for claim in claims) >= 0.9 * NUM_RACES
    whole = compare_pairs("a", "b", [[block] for block in blocks], num_comparisons=1).slowdown
    assert whole is not None
    # Each rank sleeps a tenth, and the slowest one's step counts: a little more than a tenth in all.
    assert PLANTED_SLOWDOWN / 2 < whole.low < whole.high < 2 * PLANTED_SLOWDOWN  # type: ignore[operator]
