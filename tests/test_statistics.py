"""The statistics of a race: tried on numbers with known answers, and on real runs."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from compare.report.statistics import (
    SMALLEST_CLAIM,
    PairedStarts,
    compare_group,
    detectable_difference,
    detectable_later,
    log_ratio,
    mean_interval,
)
from compare.results import Comparison, Spread
from launch.starters.interface import PROJECT_DIRECTORY
from tests.calibration import Campaign

PLANTED_SLOWDOWN = 0.1
NUM_RACES = 40
BLOCKS_OF_A_RACE = 7
CAMPAIGNS = sorted((PROJECT_DIRECTORY / "docs" / "results").glob("calibration-*-ranks-*.json"))


def _compare(ratios: list[float], *, num_comparisons: int = 1) -> Comparison:
    pairs = [PairedStarts("a", f"b{i or ''}", [[math.log(ratio)] for ratio in ratios]) for i in range(num_comparisons)]
    return compare_group(pairs)[0]


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
    assert slower.text.startswith("b takes 10.0 % longer than a [")
    faster = _compare([1 / 1.10, 1 / 1.11, 1 / 1.09, 1 / 1.10, 1 / 1.10])
    assert faster.claim == "faster"
    assert faster.text.startswith("a takes 10.0 % longer than b [")
    assert slower.text.split("[")[1] == faster.text.split("[")[1]


def test_a_difference_within_a_percent_is_never_claimed() -> None:
    exact = [1 + SMALLEST_CLAIM / 2] * 5
    assert _compare(exact).claim == "none"


def test_noise_is_no_difference_and_asks_for_more() -> None:
    noisy = _compare([0.9, 1.1, 0.95, 1.12, 0.97])
    assert noisy.claim == "none"
    assert noisy.more_repeats is not None
    assert noisy.more_repeats > 0
    assert f"{noisy.more_repeats} more starts" in noisy.text
    assert "smallest detectable: " in noisy.text


def test_too_few_pairs_say_nothing() -> None:
    few = _compare([2.0, 2.0])
    assert few.claim == "too few"
    assert few.slowdown is None
    assert "1 more needed at least" in few.text


def test_four_times_the_time_halves_what_is_overlooked_but_not_the_margin() -> None:
    assert detectable_later(0.031, 4) == pytest.approx(SMALLEST_CLAIM + (0.031 - SMALLEST_CLAIM) / 2)
    now = detectable_difference(0.01, 1000)
    assert detectable_later(now, 4) == pytest.approx(detectable_difference(0.005, 4000), rel=0.01)


@pytest.mark.parametrize(
    ("spread", "num_starts", "share_left"),
    [
        (Spread(turns=0.01, starting=0.0), 10, 0.25),
        (Spread(turns=0.0, starting=0.01), 10, 1.0),  # which has ten longer starts then
        (Spread(turns=0.0, starting=0.01), 5, 0.5),
        (Spread(turns=0.01, starting=0.01), 20, 0.625),
    ],
)
def test_what_starting_contributes_shrinks_with_the_starts_alone(
    spread: Spread, num_starts: int, share_left: float
) -> None:
    later = detectable_later(0.031, 4, spread=spread, num_starts=num_starts) - SMALLEST_CLAIM
    assert later == pytest.approx((0.031 - SMALLEST_CLAIM) * math.sqrt(share_left))


def test_the_detectable_difference_is_detected_in_four_races_of_five() -> None:
    deviation, num_pairs = 0.03, 7
    planted = math.log1p(detectable_difference(deviation / math.sqrt(num_pairs), num_pairs - 1))
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


def test_a_disturbed_step_does_not_matter() -> None:
    calm = [1.0] * 19
    assert log_ratio([*calm, 1.0], [1.05 * second for second in calm] + [50.0]) == pytest.approx(math.log(1.05))


@pytest.mark.parametrize("steps", [3, 4])
def test_one_long_step_of_a_short_turn_does_not_count(steps: int) -> None:
    assert log_ratio([1.0] * steps, [*[1.05] * (steps - 1), 50.0]) == pytest.approx(math.log(1.05))


def test_all_steps_of_the_shortest_turns_count() -> None:
    assert log_ratio([1.0, 1.0], [1.0, 4.0]) == pytest.approx(math.log(2))
    assert log_ratio([1.0], [4.0]) == pytest.approx(math.log(4))


@pytest.mark.parametrize("num_turns", range(1, 12))
def test_the_mean_of_a_start_is_that_of_scipy(num_turns: int) -> None:
    turns = np.random.default_rng(6).normal(0.1, 0.02, (3, num_turns))
    (comparison,) = compare_group([PairedStarts("a", "b", turns.tolist())])
    expected = stats.trim_mean(turns, 0.2, axis=1).mean()
    assert math.log1p(comparison.slowdown.estimate) == pytest.approx(expected, rel=1e-12)  # type: ignore[union-attr]


def test_disturbed_turns_do_not_matter() -> None:
    """Other programs hold up one turn of thirty, tenfold: the interval is hardly wider, and is where it was."""
    random = np.random.default_rng(4)
    calm = random.normal(math.log(1.03), 0.03, (4, 60))
    disturbed = calm.copy()
    disturbed[:, ::30] += math.log(10)
    first, second = (compare_group([PairedStarts("a", "b", turns.tolist())])[0].slowdown for turns in (calm, disturbed))
    assert second.estimate == pytest.approx(first.estimate, abs=0.003)  # type: ignore[union-attr]
    widths = [one.high - one.low for one in (first, second)]  # type: ignore[union-attr,operator]
    assert widths[1] < 1.3 * widths[0]


def test_starts_that_agree_by_chance_do_not_hide_that_turns_differ() -> None:
    turns = [math.log(1 + 0.01 * number) for number in range(20)]
    interval = compare_group([PairedStarts("a", "b", [turns] * 4)])[0].slowdown
    assert interval is not None
    # Of 20 turns 12 are left: t(0.975, 4 x 11). Yuen's error of their mean:
    winsorized = stats.mstats.winsorize(np.array(turns), limits=(0.2, 0.2))
    error = math.sqrt(19 * float(np.var(winsorized, ddof=1)) / (12 * 11))
    half = 2.0154 * error / math.sqrt(4)
    width = math.log1p(interval.high or 0) - math.log1p(interval.low or 0)
    assert width == pytest.approx(2 * half, rel=1e-3)


@pytest.mark.parametrize("share_of_starting", [0.0, 0.25, 1.0, 4.0])
def test_intervals_of_turns_hold_together(share_of_starting: float) -> None:
    """Three entrants, four starts, twelve turns; some of the variance of a start's mean arises when it starts."""
    random, num_turns, num_races = np.random.default_rng(2), 12, 500
    held = 0
    for _ in range(num_races):
        starting = random.normal(0, math.sqrt(share_of_starting / num_turns), (3, 4, 1))
        times = 0.02 * (random.normal(0, 1, (3, 4, num_turns)) + starting)
        pairs = [PairedStarts(str(a), str(b), (times[b] - times[a]).tolist()) for a, b in ((0, 1), (0, 2), (1, 2))]
        intervals = [comparison.slowdown for comparison in compare_group(pairs)]
        held += all(one is not None and one.low < 0 < one.high for one in intervals)  # type: ignore[operator]
    assert held / num_races > 0.93


def test_what_makes_starts_differ_is_told_apart() -> None:
    """Of a pair, turns differ by 3 % and starts by 1 %, so that the mean of 36 turns alone would differ by 0.5 %."""
    random = np.random.default_rng(5)
    found = []
    for _ in range(300):
        times = random.normal(0, 0.03 / math.sqrt(2), (3, 8, 36)) + random.normal(0, 0.01 / math.sqrt(2), (3, 8, 1))
        pairs = [PairedStarts(str(a), str(b), (times[b] - times[a]).tolist()) for a, b in ((0, 1), (0, 2), (1, 2))]
        found.append(compare_group(pairs)[0].spread)
    turns, starting = (math.sqrt(np.mean([getattr(one, name) ** 2 for one in found])) for name in ("turns", "starting"))
    assert turns == pytest.approx(0.005, rel=0.1)
    assert starting == pytest.approx(0.01, rel=0.1)


def test_starts_with_a_single_value_have_no_spread() -> None:
    assert _compare([1.1, 1.2, 1.3]).spread is None


def test_intervals_hold_beside_an_entrant_that_is_thirty_times_as_noisy() -> None:
    random = np.random.default_rng(3)
    spread = np.array([0.01, 0.01, 0.01, 0.01, 0.3])[:, None, None]
    num_races, held = 100, 0
    for _ in range(num_races):
        turns = spread * random.normal(size=(5, 3, 4)) + 0.02 * random.normal(size=(5, 3, 1))
        pairs = [PairedStarts(str(a), str(b), (turns[b] - turns[a]).tolist()) for a, b in combinations(range(5), 2)]
        intervals = [comparison.slowdown for comparison in compare_group(pairs)]
        held += all(interval.low <= 0 <= interval.high for interval in intervals)  # type: ignore[union-attr,operator]
    assert held >= 0.9 * num_races


def test_intervals_hold_beside_an_entrant_whose_starts_differ_three_times_as_much() -> None:
    """Six entrants are compared with one; they would hold in fewer if all pairs shared what starting adds."""
    random = np.random.default_rng(4)
    starting = np.array([0.0042, 0.0042, 0.0042, 0.0042, 0.0042, 0.0042, 0.0175])[:, None, None]
    num_races, held = 1000, 0
    for _ in range(num_races):
        turns = 0.03 * random.normal(size=(7, 4, 40)) + starting * random.normal(size=(7, 4, 1))
        pairs = [PairedStarts("0", str(other), (turns[other] - turns[0]).tolist()) for other in range(1, 7)]
        intervals = [one.slowdown for one in compare_group(pairs)]
        held += all(interval.low <= 0 <= interval.high for interval in intervals)  # type: ignore[union-attr,operator]
    assert held >= 0.945 * num_races


def test_intervals_hold_against_an_opponent_that_was_chosen_because_it_is_the_fastest() -> None:
    random = np.random.default_rng(5)
    num_races, held = 1000, 0
    for _ in range(num_races):
        turns = 0.03 * random.normal(size=(6, 4, 40)) + 0.0042 * random.normal(size=(6, 4, 1))
        fastest = int(turns[:4].mean(axis=(1, 2)).argmin())
        pairs = [PairedStarts("fastest", str(b), (turns[b] - turns[fastest]).tolist()) for b in (4, 5)]
        intervals = [one.slowdown for one in compare_group(pairs, num_opponents=4)]
        held += all(interval.low <= 0 <= interval.high for interval in intervals)  # type: ignore[union-attr,operator]
    assert held >= 0.945 * num_races


@pytest.mark.parametrize(("starting_of_a_peer", "at_least"), [(0.0042, 0.945), (0.0175, 0.92)])
def test_intervals_of_each_backend_beside_each_peer_hold_together(starting_of_a_peer: float, at_least: float) -> None:
    """Beside a peer whose starts differ four times as much, they hold in 93 % of races with four starts, not in 95."""
    random = np.random.default_rng(5)
    starting = np.array([0.0042, 0.0042, 0.0042, 0.0042, 0.0042, starting_of_a_peer])[:, None, None]
    num_races, held = 1000, 0
    for _ in range(num_races):
        turns = 0.03 * random.normal(size=(6, 4, 40)) + starting * random.normal(size=(6, 4, 1))
        pairs = [PairedStarts(str(a), str(b), (turns[b] - turns[a]).tolist()) for a in range(4) for b in (4, 5)]
        intervals = [one.slowdown for one in compare_group(pairs)]
        held += all(interval.low <= 0 <= interval.high for interval in intervals)  # type: ignore[union-attr,operator]
    assert held >= at_least * num_races


def test_an_interval_that_says_nothing_is_still_a_number() -> None:
    pairs = [PairedStarts("a", "b", [[0.0, 900.0], [-900.0, 1.0], [5000.0, 3.0]])]
    (comparison,) = compare_group(pairs)
    assert comparison.claim == "none"
    assert all(map(math.isfinite, (comparison.slowdown.low, comparison.slowdown.high)))  # type: ignore[union-attr,arg-type]


def test_one_pair_with_too_few_starts_says_so_beside_others() -> None:
    many, few = PairedStarts("a", "b", [[0.0, 0.01]] * 3), PairedStarts("a", "c", [[0.0, 0.01]] * 2)
    assert [comparison.claim for comparison in compare_group([many, few])] == ["none", "too few"]


def test_pairs_of_equal_names_keep_their_own_comparisons() -> None:
    many, few = PairedStarts("a", "b", [[0.1, 0.11]] * 3), PairedStarts("a", "b", [[0.0, 0.01]] * 2)
    assert [comparison.claim for comparison in compare_group([few, many])] == ["too few", "slower"]


def test_a_mean_of_one_run_has_no_interval() -> None:
    assert mean_interval([5.0]).low is None
    both = mean_interval([4.0, 9.0])
    assert both.estimate == pytest.approx(6.0)
    assert both.low is not None
    assert 0 < both.low < 4.0


def _real_blocks(first: str, second: str) -> list[tuple[float, float]]:
    """Seconds per step of real runs, by block: tests/calibration.py made them."""
    path = PROJECT_DIRECTORY / "docs" / "results" / "calibration-2026-11-21.json"
    seconds = json.loads(path.read_text())["seconds_per_step"]
    return list(zip(seconds[first], seconds[second], strict=True))


def _claims(blocks: list[tuple[float, float]]) -> list[str]:
    """Of races that each drew some of the real blocks."""
    random = np.random.default_rng(0)
    draws = [random.choice(len(blocks), BLOCKS_OF_A_RACE, replace=False) for _ in range(NUM_RACES)]
    return [_compare([blocks[index][1] / blocks[index][0] for index in draw]).claim for draw in draws]


def test_a_backend_against_itself_differs_in_few_real_races() -> None:
    claims = _claims(_real_blocks("ddp", "same"))
    assert sum(claim != "none" for claim in claims) <= 0.05 * NUM_RACES


def test_a_planted_slowdown_is_found_in_most_real_races() -> None:
    blocks = _real_blocks("ddp", "slowed")
    claims = _claims(blocks)
    assert sum(claim == "slower" for claim in claims) >= 0.9 * NUM_RACES
    whole = _compare([theirs / ours for ours, theirs in blocks]).slowdown
    assert whole is not None
    # Each rank sleeps a tenth, and the slowest one's step counts: a little more than a tenth in all.
    assert PLANTED_SLOWDOWN / 2 < whole.low < whole.high < 2 * PLANTED_SLOWDOWN  # type: ignore[operator]


def test_real_races_are_there_to_be_judged() -> None:
    assert CAMPAIGNS


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_separate_real_races_find_what_was_planted_and_nothing_else(path: Path) -> None:
    """Campaigns go on from what is there: where a tenth of the races is no whole number, one more may overlook it."""
    campaign = Campaign.model_validate_json(path.read_bytes())
    judged = [race.judged() for race in campaign.races]
    assert sum(claims["ddp same"] != "none" for claims in judged) <= 0.05 * len(judged)
    assert sum(claims["ddp slowed"] != "slower" for claims in judged) <= math.ceil(0.1 * len(judged))
