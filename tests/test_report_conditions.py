"""What a report calls conditions: no two jobs, and no two networks, have the same name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from compare.report.analysis import analyse
from compare.report.grouping import EntrantRuns
from compare.report.info import ReportInfo
from compare.report.markdown import results_table
from compare.report.runs import Run
from compare.report.tables import standing_cell
from compare.report.training import seed_table_of
from records.record import RunRecord
from tests.launching import train

OPTIONS = ["--task", "token-tagging", "--max-steps", "12", "--threads-per-rank", "1", "--global-batch-size", "16"]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("records")
    for name in ("single", "ddp"):
        train(name, directory / name, *OPTIONS)
    return {name: (directory / name / "record.json").read_text() for name in ("single", "ddp")}


def _run(content: str, part: str, change: Mapping[str, Any]) -> Run:
    """Returns a run outside a race, with other values in a part of its record."""
    record = json.loads(content)
    record[part] |= change
    return Run(f"{record['config']['backend']}, {change}", RunRecord.model_validate(record), race=None)


def test_conditions_of_two_jobs_say_in_what_these_differ(contents: dict[str, str]) -> None:
    """They do not name what follows from the number of ranks, in which opponents may differ."""
    runs = [_run(contents[name], "config", {"learning_rate": rate}) for name in contents for rate in (0.125, 0.25)]
    results = analyse(runs[:-1], [], ReportInfo("test"))  # of the second job, one process alone
    assert {standing.conditions for standing in results.standings} == {
        "fp32, 16 samples a step; learning rate 0.125",
        "fp32, 16 samples a step; learning rate 0.25",
    }
    assert [len(standing.placings) for standing in results.standings] in ([1, 2], [2, 1])
    rows = [[cell.strip() for cell in line.split("|")] for line in results_table(results).splitlines()]
    assert rows[0][1:3] == ["told apart by", "ranks"]
    told = {(row[5], row[1]) for row in rows[2:]}
    assert told == {("ddp", "-"), ("single", "learning rate 0.125"), ("single", "learning rate 0.25")}


def test_one_job_is_not_told_apart(contents: dict[str, str]) -> None:
    results = analyse([_run(contents[name], "config", {}) for name in contents], [], ReportInfo("test"))
    assert [standing.conditions for standing in results.standings] == ["fp32, 16 samples a step"]
    assert results_table(results).startswith("| ranks | precision |")


def test_allocators_of_ranks_on_several_nodes_are_all_named(contents: dict[str, str]) -> None:
    record = json.loads(contents["ddp"])
    for rank, name in zip(record["ranks"], ("tcmalloc", "glibc"), strict=True):
        rank["allocator"] = name
    runs = [Run("nodes", RunRecord.model_validate(record), race=None), _run(contents["single"], "config", {})]
    results = analyse(runs, [], ReportInfo("test"))
    told = {one.name: one.settings["allocator"] for group in results.groups for one in group.entrants}
    assert told["ddp"] == "glibc tcmalloc"
    assert " " not in str(told["single"])


def test_conditions_of_an_opponent_on_one_rank_say_what_connects_the_others(contents: dict[str, str]) -> None:
    runs = [_run(contents["single"], "config", {}), _run(contents["ddp"], "config", {})]
    content = json.loads(contents["ddp"])
    content["config"] |= {"num_nodes": 2, "master_addr": "10.78.0.10"}
    runs.append(_run(json.dumps(content), "environment", {"network": "2 network namespaces, 1gbit"}))
    results = analyse(runs, [], ReportInfo("test", opponent="single"))
    assert {standing.opponent for standing in results.standings} == {"single, 1 rank"}
    assert {standing.conditions for standing in results.standings} == {
        "fp32, 16 samples a step; ranks on one node",
        "fp32, 16 samples a step; ranks on network namespaces, 1gbit",
    }


def test_only_who_was_seen_to_differ_is_called_out_of_lockstep(contents: dict[str, str]) -> None:
    """The table of published comparisons also names who computes an approximation, and who could not be judged."""
    run = _run(contents["ddp"], "config", {})
    results = analyse([run, _run(contents["single"], "config", {})], [], ReportInfo("test"))
    (group,) = (group for group in results.groups if group.entrants[0].name == "ddp")
    (entrant,) = group.entrants
    trained = EntrantRuns("ddp", "", "ddp", "backend", whole=run)

    def named() -> str:
        (row,) = seed_table_of([group], [[trained]])
        return row.backend

    assert entrant.ranked
    assert named().endswith(", fp32")
    entrant.ranked = False
    words: dict[Literal["not comparable", "approximate", "unknown"], str] = {
        "not comparable": "out of lockstep",
        "approximate": "approximate",
        "unknown": "lockstep not known",
    }
    for verdict, why in words.items():
        entrant.parity.verdict = verdict
        assert named().endswith(f", fp32 ({why})")
        assert standing_cell(entrant).text == f"⚠ {why}"
