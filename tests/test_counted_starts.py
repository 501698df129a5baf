"""Which starts a report and its steps.csv count: the same ones, for peers and for races in several parts, too."""

from __future__ import annotations

import csv
import io

import pytest

from compare.report.analysis import analyse
from compare.report.info import ReportInfo
from compare.report.runs import RaceFacts, Run, TurnFacts
from compare.report.tidy import steps_csv
from compare.results import Role
from records.record import RunRecord, read_record
from tests.launching import train

PEER = "Another trainer"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    directory = tmp_path_factory.mktemp("single") / "run"
    train("single", directory, "--task", "token-tagging", "--max-steps", "40", "--threads-per-rank", "1")
    return read_record(directory / "record.json")


def _run(
    record: RunRecord, entrant: str, start: int, *, part: int = 0, seconds: float = 0.1, share: float = 0.0
) -> Run:
    """One start: ten steps of warm-up, and three turns of ten steps, while other programs take a share of the cores."""
    turns = [
        TurnFacts(
            round=number, position=0, first_step=10 * number + 1, num_steps=10, step_seconds=[seconds] * 10,
            cpu_seconds=1.0, instructions=None, foreign_share=share,
        )
        for number in range(4)
    ]  # fmt: skip
    role: Role = "peer" if entrant == PEER else "backend"
    race = RaceFacts(
        race="race", purpose="timed", entrant=entrant, role=role, block=start, position=0, heat=part, busy_share=0.0,
        gpu_processes=0, foreign_share=share, matmul_flops_per_second=None, turns=turns,
    )  # fmt: skip
    return Run(f"{entrant}-{start}-{part}", record, race)


def _timed(runs: list[Run], column: str) -> set[tuple[str, str]]:
    """Returns the entrants of steps that steps.csv calls timed, each with its value in a column."""
    rows = csv.DictReader(io.StringIO(steps_csv(runs)))
    return {(row["entrant"], row[column]) for row in rows if row["timed"] == "true"}


def test_a_disturbed_start_counts_for_no_peer(single: RunRecord) -> None:
    runs = [_run(single, entrant, start) for entrant in ("single", PEER) for start in (1, 3, 4)]
    runs += [_run(single, entrant, 2, seconds=9.0, share=0.3) for entrant in ("single", PEER)]
    results = analyse(runs, [], ReportInfo("test"))
    ((entrant,),) = (group.entrants for group in results.groups)
    assert entrant.num_runs == 3
    assert sum("start 2 is left out" in problem for problem in results.problems) == 1
    (comparison,) = results.peers
    assert comparison.num_starts == 3
    ours, theirs = (row.tokens_per_second for row in comparison.rows)
    assert ours == theirs
    assert theirs is not None
    assert theirs.low == pytest.approx(theirs.estimate)  # as of starts that were all equally long
    assert _timed(runs, "block") == {(name, block) for name in ("single", PEER) for block in ("1", "3", "4")}


def test_no_peer_loses_the_starts_that_it_needs(single: RunRecord) -> None:
    """It has failed once, so that the disturbed start counts for all."""
    runs = [_run(single, "single", start, share=0.3 * (start == 2)) for start in (1, 2, 3, 4)]
    runs += [_run(single, PEER, start, share=0.3 * (start == 2)) for start in (1, 2, 3)]
    results = analyse(runs, [], ReportInfo("test"))
    assert [one.num_starts for one in results.peers] == [3]
    assert [entrant.num_runs for group in results.groups for entrant in group.entrants] == [4]
    assert not any("is left out" in problem for problem in results.problems)
    assert len(_timed(runs, "block")) == 4 + 3


def test_an_entrant_of_several_parts_is_timed_in_the_first(single: RunRecord) -> None:
    """What it took longer in later parts corrects the times of others there, and is no speed of its own."""
    ddp = single.model_copy(update={"config": single.config.model_copy(update={"backend": "ddp"})})
    runs = []
    for start in (1, 2, 3):
        runs += [_run(single, "single", start, part=part, seconds=0.1 * (1 + part)) for part in (0, 1)]
        runs.append(_run(ddp, "ddp", start, part=1, seconds=0.2))
    results = analyse(runs, [], ReportInfo("test"))
    assert [(one.name, one.num_runs) for group in results.groups for one in group.entrants] == [
        ("single", 3),
        ("ddp", 3),
    ]
    assert _timed(runs, "part") == {("single", "0"), ("ddp", "1")}
    assert len(list(csv.DictReader(io.StringIO(steps_csv(runs))))) == 40 * len(runs)
