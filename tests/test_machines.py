"""Runs of several machines in one report: never compared with each other, and told apart by people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare.report.analysis import analyse
from compare.report.headline import headlines
from compare.report.html import render_html
from compare.report.info import ReportInfo
from compare.report.machines import describe_machine, located, same_machine
from compare.report.markdown import headline_table, results_table
from compare.report.runs import RaceFacts, Run
from compare.results import CollectiveSeries, Results
from records.record import RunRecord
from tests.launching import train
from tests.sample_results import sample_results

Change = Callable[[dict[str, Any]], None]
OPTIONS = ["--task", "token-tagging", "--max-steps", "12", "--threads-per-rank", "1", "--global-batch-size", "16"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One process, and two ranks on the same batches, each as its record."""
    directory = tmp_path_factory.mktemp("records")
    for name in ("single", "ddp"):
        train(name, directory / name, *OPTIONS)
    return {name: (directory / name / "record.json").read_text() for name in ("single", "ddp")}


def _on(
    content: str, *, host: str = "vm", boot: str | None = "first", cpu: str = "AMD EPYC", change: Change | None = None
) -> RunRecord:
    record = json.loads(content)
    record["environment"] |= {"boot_id": boot, "cpu": cpu, "num_cpus": 2}
    for rank in record["ranks"]:
        rank["hostname"] = host
    if change is not None:
        change(record)
    return RunRecord.model_validate(record)


def _analyse(*records: RunRecord) -> Results:
    return analyse([Run(f"{number}.json", record, race=None) for number, record in enumerate(records)], [], INFO)


INFO = ReportInfo("test")


def _labels(*records: RunRecord) -> list[str]:
    runs = located([Run(f"{number}.json", record, race=None) for number, record in enumerate(records)])
    return [run.machine.label for run in runs if run.machine is not None]


def test_a_host_keeps_its_name_and_a_container_the_boot_of_its_host(records: dict[str, str]) -> None:
    ddp = records["ddp"]
    assert set(_labels(_on(ddp, host="a", boot="first"), _on(ddp, host="a", boot="second"))) == {"AMD EPYC, 2 cores"}
    assert set(_labels(_on(ddp, host="3f2a"), _on(ddp, host="9c1b"))) == {"AMD EPYC, 2 cores"}
    # The third shows that the first two are one: it has the name of one and the boot of the other.
    chain = (_on(ddp, host="a", boot="1"), _on(ddp, host="b", boot="2"), _on(ddp, host="a", boot="2"))
    assert _labels(*chain) == ["AMD EPYC, 2 cores"] * 3


def test_machines_in_the_same_words_are_told_apart_by_their_hosts(records: dict[str, str]) -> None:
    ddp = records["ddp"]
    other = {"host": "b", "boot": "other"}
    assert _labels(_on(ddp, host="a"), _on(ddp, **other)) == ["AMD EPYC, 2 cores (a)", "AMD EPYC, 2 cores (b)"]
    assert _labels(_on(ddp), _on(ddp, cpu="Xeon")) == ["AMD EPYC, 2 cores", "Xeon, 2 cores"]
    # Of records that are older, only the name of the host is known.
    assert len(set(_labels(_on(ddp, host="a", boot=None), _on(ddp, host="b", boot=None)))) == 2


def test_the_same_hardware_without_a_common_mark_is_another_machine(records: dict[str, str]) -> None:
    environment = _on(records["ddp"]).environment
    ours = describe_machine(environment, ["a"])
    assert same_machine(ours, describe_machine(environment, ["b"]))  # of the same boot
    moved = environment.model_copy(update={"boot_id": "another"})
    assert same_machine(ours, describe_machine(moved, ["a"]))
    assert not same_machine(ours, describe_machine(moved, ["b"]))
    assert not same_machine(ours, describe_machine(environment.model_copy(update={"num_cpus": 64}), ["a"]))


def test_nothing_of_two_machines_is_compared(records: dict[str, str]) -> None:
    here, there = {"host": "a"}, {"host": "b", "boot": "other"}
    results = _analyse(
        *(_on(records[name], **place) for place in (here, there) for name in ("single", "ddp")),
    )
    machines = {"AMD EPYC, 2 cores (a)", "AMD EPYC, 2 cores (b)"}
    assert {group.group.machine for group in results.groups} == machines
    assert all(group.group.key.endswith(group.group.machine or "nowhere") for group in results.groups)
    assert all(len(group.entrants) == 1 for group in results.groups)
    assert {standing.conditions.partition("; ")[2] for standing in results.standings} == machines
    assert all(len(standing.placings) == 2 for standing in results.standings)
    assert {one.condition.partition("; ")[2] for one in results.scaling} <= machines
    assert [len(one.rivals) for one in headlines(results)] == [1, 1]
    assert all(group.machine == one.alone.machine for one in headlines(results) for group, _ in one.rivals)
    assert {place.machine for place in results.places} == machines
    assert any("2 different machines" in problem for problem in results.problems)
    rows = results_table(results).splitlines()
    assert rows[0].startswith("| machine |")
    assert len(set(rows)) == len(rows)
    assert len(set(headline_table(results).splitlines())) == 2 + 4
    text = render_html(results) + results_table(results)
    assert "[&#39;" not in text
    assert "['" not in text


def test_one_machine_is_not_named_again_and_again(records: dict[str, str]) -> None:
    results = _analyse(*(_on(records[name]) for name in ("single", "ddp")))
    assert {group.group.machine for group in results.groups} == {None}
    assert not any("EPYC" in group.group.key for group in results.groups)
    assert not results_table(results).startswith("| machine |")


def test_groups_that_differ_in_an_option_say_so_in_words(records: dict[str, str]) -> None:
    def otherwise(record: dict[str, Any]) -> None:
        record["config"]["learning_rate"] = 0.25
        record["task"]["sizes"] = [16, 32]

    results = _analyse(_on(records["ddp"]), _on(records["ddp"], change=otherwise))
    second, first = sorted(group.group.key.partition("; ")[2] for group in results.groups)
    assert "learning rate 0.25, data sizes 16, 32" in first
    assert "data sizes not set" in second


def test_a_run_that_failed_belongs_to_the_machine_it_failed_on(records: dict[str, str]) -> None:
    def fail(record: dict[str, Any]) -> None:
        record.update(status="failed", error="out of luck", ranks=[], steps=[], evaluations=[], quality={})

    good = [_on(records["ddp"], host=host, boot=host) for host in ("a", "b")]
    results = _analyse(*good, _on(records["ddp"], boot="b", change=fail))
    failures = {group.group.machine: group.entrants[0].failures for group in results.groups}
    assert failures["AMD EPYC, 2 cores (a)"] == []
    assert failures["AMD EPYC, 2 cores (b)"] == ["out of luck (2.json)"]
    elsewhere = _analyse(*good, _on(records["ddp"], boot="c", change=fail))
    assert not any(group.entrants[0].failures for group in elsewhere.groups)
    assert any("out of luck" in problem for problem in elsewhere.problems)
    # Without a word of where it was, it belongs to the only machine there is.
    (alone,) = _analyse(good[0], _on(records["ddp"], boot=None, change=fail)).groups
    assert alone.entrants[0].failures == ["out of luck (1.json)"]


def test_collectives_of_two_machines_are_shown_apart(records: dict[str, str]) -> None:
    def measured(record: RunRecord) -> CollectiveSeries:
        return sample_results().collectives[0].model_copy(update={"machine": describe_machine(record.environment, [])})

    here, there = (_on(records["ddp"], host=host, boot=host) for host in ("a", "b"))
    elsewhere = _on(records["ddp"], boot="elsewhere")
    older = _on(records["ddp"], boot=None, cpu="Xeon")
    runs = [Run(f"{number}.json", record, None) for number, record in enumerate([here, there, older])]
    series = [measured(record) for record in (here, there, elsewhere, older)]
    results = analyse(runs, series, INFO)
    labels = [one.machine.label for one in results.collectives if one.machine]
    one, two, three, four = labels
    assert (one, two, four) == ("AMD EPYC, 2 cores (a)", "AMD EPYC, 2 cores (b)", "Xeon, 2 cores")
    assert three.startswith("AMD EPYC, 2 cores #")
    page = render_html(results)
    assert all(f"cpu; {label}" in page for label in labels)
    alone = render_html(analyse(runs[:1], series[:1], INFO))
    assert "cpu; " not in alone


def test_races_of_the_same_name_on_two_machines_are_not_paired(records: dict[str, str], tmp_path: Path) -> None:
    facts = RaceFacts(
        race="20260101-000000-7",
        purpose="timed",
        block=1,
        position=0,
        busy_share=0,
        gpu_processes=0,
        foreign_share=0,
        matmul_flops_per_second=None,
    )
    runs = [
        Run(f"{host}{block}.json", _on(records["ddp"], host=host, boot=host), facts.model_copy(update={"block": block}))
        for host in ("a", "b")
        for block in (1, 2, 3)
    ]
    results = analyse(runs, [], INFO)
    assert [len(group.entrants) for group in results.groups] == [1, 1]
    assert [group.entrants[0].num_runs for group in results.groups] == [3, 3]
    assert not any(group.comparisons for group in results.groups)
