"""A race beside an earlier one: what passes, what does not, and what may not be compared."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from compare.race.baseline import like_baseline
from compare.race.options import RaceOptions
from compare.report.baseline import (
    Baseline,
    GateOptions,
    differences_before,
    differences_between,
    entrants_of,
    read_baseline,
)
from compare.report.gate import judge, welch
from compare.report.gate_table import verdict_of
from compare.report.html import render_html
from compare.report.machines import describe_machine
from compare.report.markdown import render_markdown
from compare.report.page import Table
from compare.report.places import versions_of
from compare.report.sections import beside_the_ranking
from compare.report.statistics import mean_interval
from compare.results import Gate, GateRow, Results
from launch.errors import UsageError
from launch.starters.interface import PROJECT_DIRECTORY
from records.environment import describe_environment
from tests.launching import run_config
from tests.sample_results import sample_results

STEADY = (0.99, 1.0, 1.005, 1.01)


def _results(rates: dict[str, float], spread: Sequence[float] = STEADY, **place: Any) -> Results:
    """A race of entrants on one rank, with so many samples a second."""
    results = sample_results(steps_a_run=10)
    results.groups, results.standings = results.groups[:1], []
    group = results.groups[0]
    group.group.conditions = {"max_steps": 60, "learning_rate": 0.1, "data": {"data_digest": "abc"}}
    samples = {entrant.name: entrant for entrant in group.entrants}
    group.entrants = [samples[name].model_copy(deep=True) for name in rates]
    for entrant, rate in zip(group.entrants, rates.values(), strict=True):
        entrant.samples_per_second_of_runs = [rate * factor for factor in spread]
        entrant.num_runs = len(spread)
        entrant.samples_per_second = mean_interval(entrant.samples_per_second_of_runs)
    environment = describe_environment(with_torch=False).model_copy(update=place)
    results.places[0].hardware = describe_machine(environment, [place.get("host", "vm")])
    results.places[0].versions = versions_of(environment)
    return results


def _baseline(results: Results, *, allowed: bool = False) -> Baseline:
    return Baseline(results, fail_above=0.03, is_other_allowed=allowed)


def _judged(now: Results, then: Results, *, allowed: bool = False) -> Gate:
    gate = judge(now, _baseline(then, allowed=allowed)).gate
    assert gate is not None
    return gate


def _row(gate: Gate, name: str) -> GateRow:
    (row,) = (row for row in gate.rows if row.entrant.startswith(f"{name} ("))
    return row


@pytest.mark.parametrize("sizes", [(3, 3), (4, 9), (12, 5)])
def test_the_interval_is_welchs(sizes: tuple[int, int]) -> None:
    dice = random.Random(sum(sizes))
    above = [dice.lognormvariate(0.05, 0.03) for _ in range(sizes[0])]
    below = [dice.lognormvariate(0.0, 0.01) for _ in range(sizes[1])]
    interval, detectable = welch(above, below, 0.99, 0.03)
    logs = [[math.log(value) for value in sample] for sample in (above, below)]
    expected = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.99)
    assert interval.low == pytest.approx(math.expm1(expected.low))
    assert interval.high == pytest.approx(math.expm1(expected.high))
    assert detectable > 0.03 + (interval.high - interval.low) / 2


def test_the_gate_is_seldom_wrong_and_finds_what_it_says_it_would() -> None:
    """A made-up machine on which starts differ by 1 %: 400 gates without a change, and 400 with the one to be seen."""
    dice = random.Random(5)

    def starts(mean: float, number: int) -> list[float]:
        return [dice.lognormvariate(math.log(mean), 0.01) for _ in range(number)]

    alarms, found = 0, 0
    for _ in range(400):
        interval, _ = welch(starts(100, 5), starts(100 / 1.03, 4), 0.95, 0.03)
        alarms += (interval.low or 0) > 0.03
        error = 0.01 * math.sqrt(1 / 5 + 1 / 4)
        visible = 1.03 * math.exp((2.365 + 0.896) * error)  # Student's quantiles for 7 degrees of freedom
        interval, _ = welch(starts(100, 5), starts(100 / visible, 4), 0.95, 0.03)
        found += (interval.low or 0) > 0.03
    assert alarms <= 20  # 2.5 % are expected
    assert 290 <= found <= 350  # 80 % are


def test_a_race_like_its_baseline_passes() -> None:
    then = _results({"single": 600, "ddp": 590})
    now = _results({"single": 601, "ddp": 588})
    gate = _judged(now, then)
    assert gate.passed
    assert [row.status for row in gate.rows] == ["passed", "passed"]
    row = _row(gate, "ddp")
    assert row.change is not None
    assert row.change.estimate == pytest.approx(590 / 588 - 1)
    assert row.detectable is not None
    assert row.detectable > 0.03
    assert gate.differences == []
    assert any(sentence.startswith("PASSED") for sentence in verdict_of(gate))


def test_an_entrant_that_is_slower_beyond_its_interval_does_not_pass() -> None:
    then = _results({"single": 600, "ddp": 590, "horovod": 500})
    now = _results({"single": 600, "ddp": 590 / 1.10, "horovod": 500 / 1.035})
    gate = _judged(now, then)
    assert not gate.passed
    assert [row.status for row in gate.rows] == ["passed", "slower", "passed"]
    assert "more than 3 %" in _row(gate, "ddp").text
    assert "which is not certain" in _row(gate, "horovod").text  # 3.5 %, give or take more than half a percent
    failed = [sentence for sentence in verdict_of(gate) if sentence.startswith("FAILED")]
    assert len(failed) == 1
    assert "ddp" in failed[0]


def test_the_spread_of_starts_of_either_race_counts() -> None:
    wild = (0.9, 1.0, 1.05, 1.1)
    for spreads in ((STEADY, wild), (wild, STEADY)):
        then, now = (_results({"ddp": rate}, spread) for rate, spread in zip((600, 600 / 1.1), spreads, strict=True))
        assert _judged(now, then).passed


def test_a_machine_that_is_slower_as_a_whole_is_told_from_an_entrant_that_is() -> None:
    then = _results({"single": 600, "ddp": 590})
    slow_machine = _judged(_results({"single": 540, "ddp": 531}), then)
    relative = _row(slow_machine, "ddp").relative_change
    assert relative is not None
    assert relative.estimate == pytest.approx(0, abs=1e-9)
    assert not slow_machine.passed
    assert "the machine may be slower now" in _row(slow_machine, "ddp").text
    slow_entrant = _row(_judged(_results({"single": 600, "ddp": 531}), then), "ddp")
    assert slow_entrant.relative_change is not None
    assert slow_entrant.relative_change.low is not None
    assert slow_entrant.relative_change.low > 0.03
    assert "the machine may be slower now" not in slow_entrant.text


def test_who_left_lockstep_failed_or_is_missing_does_not_pass() -> None:
    then = _results({"single": 600, "ddp": 590, "horovod": 500})
    now = _results({"single": 600, "ddp": 590, "horovod": 500})
    single, ddp, horovod = now.groups[0].entrants
    ddp.ranked, ddp.parity.verdict, ddp.parity.detail = False, "not comparable", "step 4 differs"
    horovod.ranked, horovod.num_runs, horovod.samples_per_second = False, 0, None
    horovod.failures = ["rank 1: out of luck"]
    gate = _judged(now, then)
    assert [row.status for row in gate.rows] == ["passed", "not in lockstep", "missing"]
    assert "step 4 differs" in _row(gate, "ddp").text
    assert "out of luck" in _row(gate, "horovod").text
    assert not gate.passed
    now.groups[0].entrants = [single]
    assert [row.status for row in _judged(now, then).rows] == ["passed", "missing", "missing"]


def test_who_could_not_be_judged_does_not_pass() -> None:
    then, now = (_results({"single": 600, "ddp": 590}) for _ in range(2))
    ddp = now.groups[0].entrants[1]
    ddp.ranked, ddp.parity.verdict, ddp.parity.detail = False, "unknown", "no diagnosis run of the reference completed"
    gate = _judged(now, then)
    assert not gate.passed
    assert _row(gate, "ddp").status == "lockstep not known"
    assert _row(gate, "ddp").text.endswith(" could not be judged: no diagnosis run of the reference completed")


def test_too_few_starts_do_not_pass_and_a_new_entrant_does() -> None:
    gate = _judged(_results({"single": 600, "ddp": 590}, STEADY[:2]), _results({"single": 600}))
    assert [row.status for row in gate.rows] == ["too few", "new"]
    assert "2 of its starts completed, and 3 are needed" in gate.rows[0].text
    assert not gate.passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu": "Another CPU"}, "of another machine"),
        ({"boot_id": "another", "host": "other"}, "of another machine"),
        ({"python": "3.99"}, "of Python"),
        ({"platform": "Linux-1.0"}, "of kernel"),
        ({"packages": {"torch": "1.0"}}, "of torch"),
    ],
)
def test_another_machine_or_version_is_refused_unless_allowed(change: dict[str, Any], words: str) -> None:
    then, now = _results({"ddp": 590}, **change), _results({"ddp": 590})
    with pytest.raises(UsageError, match=f"--baseline: it is {words}.*--allow-other-baseline"):
        judge(now, _baseline(then))
    gate = _judged(now, then, allowed=True)
    assert gate.passed
    assert words in gate.differences[0]
    assert any(sentence.startswith("The baseline was used although it is") for sentence in verdict_of(gate))
    assert "used although" in render_markdown(judge(now, _baseline(then, allowed=True)))
    assert "used although" in render_html(judge(now, _baseline(then, allowed=True)))


def test_a_machine_that_was_started_anew_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    then, now = _results({"ddp": 590}, boot_id="one"), _results({"ddp": 590}, boot_id="two")
    assert differences_between(_baseline(then), now) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("data", {"data_digest": "xyz"}, "its data digest is abc, not xyz"),
        ("max_steps", 61, "its max steps is 60, not 61"),
        ("learning_rate", 0.2, "its learning rate is 0.1, not 0.2"),
        ("network", "2 nodes", "its network is one node, not 2 nodes"),
    ],
)
def test_other_data_or_steps_are_refused_unless_allowed(name: str, value: Any, words: str) -> None:
    then, now = _results({"single": 600, "ddp": 590}), _results({"single": 600, "ddp": 590})
    now.groups[0].group.conditions[name] = value
    with pytest.raises(UsageError, match=words):
        judge(now, _baseline(then))
    assert _judged(now, then, allowed=True).differences == [words]


def test_ranks_that_are_scheduled_otherwise_are_refused_unless_allowed() -> None:
    """A baseline from before there was a choice was scheduled as usual."""
    then, now = _results({"ddp": 1000.0}), _results({"ddp": 1200.0})
    ((_, entrant),) = entrants_of(now).values()
    entrant.settings["scheduling"] = "batch"
    (difference,) = differences_between(_baseline(then), now)
    assert difference == "its ranks have the scheduling normal, not batch"
    assert differences_between(_baseline(now), now) == []


def test_other_settings_under_the_same_name_are_refused_unless_allowed() -> None:
    """As those that --tune found each time; a baseline from before they were noted may have had any."""
    then, now = _results({"ddp": 590}), _results({"ddp": 600})
    ((_, old),), ((_, new),) = entrants_of(then).values(), entrants_of(now).values()
    new.own_settings = ["--transport=shared-memory", "NCCL_ALGO=Ring"]
    assert differences_between(_baseline(then), now) == []
    old.own_settings = list(new.own_settings)
    assert differences_between(_baseline(then), now) == []
    old.own_settings = []
    words = "its ddp has no settings of its own, not --transport=shared-memory NCCL_ALGO=Ring"
    with pytest.raises(UsageError, match=f"--baseline: {words}; make one of this kind"):
        judge(now, _baseline(then))
    assert _judged(now, then, allowed=True).differences == [words]


def test_a_race_is_checked_before_it_begins() -> None:
    results = _results({"single": 600})
    environment = describe_environment(with_torch=True)
    results.places[0].versions = versions_of(environment)
    results.places[0].hardware = describe_machine(environment, [])
    config = run_config("single", 1, Path("/nowhere"), global_batch_size=32, micro_batch_size=32, learning_rate=0.1)
    group = results.groups[0].group
    assert (group.global_batch_size, group.micro_batch_size, group.precision) == (32, 32, "fp32")
    assert differences_before(_baseline(results), [("single", [], config)], {}, num_steps=60) == []
    assert differences_before(_baseline(results), [("single", [], config)], {}, num_steps=None) == []
    assert differences_before(_baseline(results), [("single", [], config)], {}, num_steps=70) == [
        "its max steps is 60, not 70"
    ]
    faster = config.model_copy(update={"learning_rate": 0.3})
    assert differences_before(_baseline(results), [("single", [], faster)], {}, num_steps=60) == [
        "its learning rate is 0.1, not 0.3"
    ]
    assert differences_before(_baseline(results), [("single", [], config)], {1: "2 nodes"}, num_steps=60) == [
        "its network is one node, not 2 nodes"
    ]
    results.groups[0].entrants[0].own_settings = []
    assert differences_before(_baseline(results), [("single", ["--x=1"], config)], {}, num_steps=60) == [
        "its single has no settings of its own, not --x=1"
    ]
    nothing: list[str] = []
    for planned in (
        [],
        [("ddp", nothing, config)],
        [("single", nothing, config.model_copy(update={"precision": "bf16"}))],
    ):
        with pytest.raises(UsageError, match=r"has single .*, which does not take part in this race"):
            differences_before(_baseline(results), planned, {}, num_steps=60)
    assert differences_before(_baseline(results), [], {}, num_steps=60, is_complete=False) == []


def test_a_race_has_the_starts_and_steps_of_its_baseline() -> None:
    baseline = _baseline(_results({"ddp": 590}))
    options = like_baseline(RaceOptions(), baseline)
    assert (options.repeats, options.timed_steps) == (4, 60)
    options = like_baseline(RaceOptions(repeats=7, timed_steps=90), baseline)
    assert (options.repeats, options.timed_steps) == (7, 90)


def test_what_cannot_be_a_baseline(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(UsageError) as refused:
            read_baseline(GateOptions(baseline=path))
        return str(refused.value)

    def written(results: Results) -> Path:
        (tmp_path / "results.json").write_text(results.model_dump_json())
        return tmp_path / "results.json"

    assert read_baseline(GateOptions()) is None
    good = read_baseline(GateOptions(baseline=written(_results({"ddp": 590}))))
    assert good is not None
    assert good.fail_above == 0.03
    assert "cannot be read" in refusal(tmp_path / "none.json")
    assert "is the directory of a report" in refusal(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert "is not JSON" in refusal(tmp_path / "broken.json")
    (tmp_path / "record.json").write_text('{"schema_version": 3}')
    assert "holds no results but the record of a run" in refusal(tmp_path / "record.json")
    newer = json.loads(_results({"ddp": 590}).model_dump_json()) | {"schema_version": 9}
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    assert "is not a results.json of this version" in refusal(tmp_path / "newer.json")
    old = PROJECT_DIRECTORY / "docs" / "results" / "race-2026-11-21" / "results.json"
    assert "was made by an older version" in refusal(old)
    assert "ddp was started 2 time(s)" in refusal(written(_results({"ddp": 590}, STEADY[:2])))
    assert "holds no entrant" in refusal(written(_results({})))
    two = _results({"ddp": 590})
    two.places.append(_results({"ddp": 590}, cpu="Another CPU", host="b").places[0])
    two.places[0].hardware.label = "the first"  # type: ignore[union-attr]
    assert "is about several machines" in refusal(written(two))
    twice = _results({"ddp": 590})
    twice.groups.append(twice.groups[0])
    assert "ddp is there twice" in refusal(written(twice))


def test_results_of_an_older_version_are_not_judged() -> None:
    """In what the baseline differs from them would not be found, so nothing can allow it."""
    then, without_conditions, without_versions = (_results({"ddp": 590}) for _ in range(3))
    without_conditions.groups[0].group.conditions = {}
    without_versions.places[0].versions = {}
    for now in (without_conditions, without_versions):
        with pytest.raises(UsageError, match="race that is compared with it was made by an older version"):
            judge(now, _baseline(then, allowed=True))


def test_the_table_of_a_gate_is_sorted_by_its_numbers() -> None:
    then, now = _results({"single": 600, "ddp": 1000}), _results({"single": 610, "ddp": 900, "horovod": 95})
    results = judge(now, _baseline(then))
    (section,) = (section for section in beside_the_ranking(results) if section.id == "gate")
    table = section.blocks[-1]
    assert isinstance(table, Table)
    assert table.numeric == [False, True, True, True, True, True, False]
    _, ddp, horovod = ([cell.value for cell in row.cells] for row in table.rows)
    gate = _judged(now, then)
    row = _row(gate, "ddp")
    assert row.baseline is not None
    assert row.now is not None
    assert row.change is not None
    assert row.relative_change is not None
    assert row.detectable is not None
    percents = [100 * one for one in (row.change.estimate, row.relative_change.estimate, row.detectable)]
    assert ddp == [None, row.baseline.estimate, row.now.estimate, *percents, None]
    assert horovod[:2] == [None, None]  # it is new
    assert horovod[2] == pytest.approx(95, rel=0.01)
    assert horovod[3:] == [None] * 4


def test_entrants_out_of_lockstep_are_no_baseline() -> None:
    results = _results({"single": 600, "ddp": 590})
    results.groups[0].entrants[1].ranked = False
    assert [cell.name for cell in entrants_of(results)] == ["single"]
