"""The report of records, wherever they were made: like with like, and nothing hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare.machine_facts import Idleness
from compare.report.analysis import analyse
from compare.report.grouping import group_runs
from compare.report.info import ReportInfo
from compare.report.machines import located
from compare.report.markdown import results_table
from compare.report.runs import RaceFacts, Run
from compare.results import Results, Role
from records.record import RunRecord, read_record
from tests.launching import lockstep, train

OPTIONS = ["--task", "token-tagging", "--max-steps", "12", "--threads-per-rank", "1"]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("records")
    for name in ("single", "ddp"):
        train(name, directory / name, *OPTIONS)
    return {name: directory / name / "record.json" for name in ("single", "ddp")}


def _changed(path: Path, change: Change) -> RunRecord:
    content = json.loads(path.read_text())
    change(content)
    return RunRecord.model_validate(content)


def _analyse(*records: RunRecord) -> Results:
    runs = [Run(f"{number}.json", record, race=None) for number, record in enumerate(records)]
    return analyse(runs, [], ReportInfo("test"))


def test_records_make_a_report(records: dict[str, Path], tmp_path: Path) -> None:
    done = lockstep("report", *records.values(), "--output-dir", tmp_path / "out", "--title", "<b>Mine</b>")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("report.html", "report.md", "results.json", "steps.csv")
    ]
    results = Results.model_validate_json((tmp_path / "out" / "results.json").read_bytes())
    assert [entrant.backend for group in results.groups for entrant in group.entrants] == ["ddp", "single"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert markdown.startswith("# \\<b\\>Mine\\</b\\>")
    assert "| ranks | precision |" in markdown
    again = lockstep("report", *records.values(), "--output-dir", tmp_path / "out")
    assert again.returncode == 2
    assert "holds results.json already" in again.stderr


def test_undiagnosed_records_are_judged_by_their_losses(records: dict[str, Path]) -> None:
    ddp, single = (read_record(records[name]) for name in ("ddp", "single"))
    verdicts = {group.entrants[0].backend: group.entrants[0].parity for group in _analyse(ddp, single).groups}
    assert verdicts["single"].verdict == "reference"
    assert verdicts["ddp"].verdict == "rounding"
    assert "weights were compared only at the end" in verdicts["ddp"].detail


def test_another_loss_is_not_comparable_and_says_where(records: dict[str, Path]) -> None:
    def spoil(record: dict[str, Any]) -> None:
        record["steps"][3]["loss"] *= 1.01

    results = _analyse(_changed(records["ddp"], spoil), read_record(records["single"]))
    parity = results.groups[0].entrants[0].parity
    assert parity.verdict == "not comparable"
    assert parity.first_step == 4
    assert not results.groups[0].entrants[0].ranked


@pytest.mark.parametrize("name", ["seed", "precision", "learning_rate", "threads_per_rank", "max_steps", "trace"])
def test_runs_of_unlike_conditions_are_never_put_together(records: dict[str, Path], name: str) -> None:
    def change(record: dict[str, Any]) -> None:
        record["config"][name] = {"precision": "bf16"}.get(name, 7)

    results = _analyse(read_record(records["ddp"]), _changed(records["ddp"], change))
    assert len(results.groups) == 2
    assert all(group.entrants[0].num_runs == 1 for group in results.groups)
    assert len({group.group.key for group in results.groups}) == 2
    if name == "seed":
        assert any("2 different seeds" in problem for problem in results.problems)


def test_runs_of_two_machines_are_kept_apart(records: dict[str, Path]) -> None:
    def move(record: dict[str, Any]) -> None:
        record["environment"]["cpu"] = "another CPU"

    results = _analyse(read_record(records["ddp"]), _changed(records["ddp"], move))
    assert len(results.groups) == 2
    assert any("different machines" in problem for problem in results.problems)
    assert len(results.places) == 2


def test_two_versions_of_one_backend_are_two_entrants(records: dict[str, Path]) -> None:
    def older(record: dict[str, Any]) -> None:
        record["environment"]["packages"]["torch"] = "2.7.0"

    (group,) = _analyse(read_record(records["ddp"]), _changed(records["ddp"], older)).groups
    assert [entrant.name for entrant in group.entrants] == ["ddp", "ddp #2"]
    assert "torch" in group.differing_settings


def test_a_failed_run_is_a_marked_row(records: dict[str, Path]) -> None:
    def fail(record: dict[str, Any]) -> None:
        record.update(status="failed", error="rank 1: out of luck", ranks=[], steps=[], evaluations=[], quality={})
        record["config"]["backend"] = "horovod"

    results = _analyse(read_record(records["ddp"]), _changed(records["ddp"], fail))
    (group,) = results.groups
    assert group.entrants[1].failures == ["rank 1: out of luck (1.json)"]
    assert any("out of luck" in problem for problem in results.problems)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not JSON"),
        (b'{"schema_version": 3, "status"', "is not JSON"),
        (b"[1, 2]", "neither the record of a run nor results"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema_version": 1}', "schema version 1, but this program reads version 3"),
        (b'{"schema_version": "<script>"}', "schema version <script>"),
        (b'{"schema_version": 3}', "is not a valid record file"),
        (b'{"kind": "collectives", "schema_version": 1}', "is not a valid collectives file"),
        (b'{"kind": "race", "schema_version": 1}', "also pass the record it belongs to"),
    ],
)
def test_a_file_that_is_no_record_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    done = lockstep("report", "bad.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.json" in done.stderr
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("config",), {}),
        (("config", "precision"), "fp8"),
        (("config", "num_processes"), -5),
        (("config", "threads_per_rank"), 0),
        (("config", "micro_batch_size"), 0),
        (("config", "learning_rate"), -1.0),
        (("config", "num_restarts"), -1),
        (("config", "race"), None),
        (("ranks", 0, "step_seconds"), [1.0]),
        (("ranks", 0, "step_seconds", 7), -1.0),
        (("ranks", 0, "step_seconds", 7), float("nan")),
        (("ranks", 0, "step_seconds", 7), 1e400),
        (("ranks", 0, "samples", 7), "many"),
        (("ranks",), []),
        (("evaluations",), []),
        (("evaluations", 0, "step"), 10**9),
        (("steps", 3, "loss"), "nan"),
        (("task", "model_shape"), {"num_layers": "all"}),
        (("environment", "cpu"), None),
        (("status",), "<script>alert(1)</script>"),
    ],
    ids=str,
)
def test_a_record_edited_by_hand_is_refused_in_a_line(
    place: tuple[Any, ...], value: Any, records: dict[str, Path], tmp_path: Path
) -> None:
    content = json.loads(records["ddp"].read_text())
    holder = content
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    (tmp_path / "edited.json").write_text(json.dumps(content))
    done = lockstep("report", "edited.json", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("lockstep: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["edited.json"]


def test_bad_calls_of_report_end_with_one_line(records: dict[str, Path], tmp_path: Path) -> None:
    for arguments, complaint in (
        ([], "PATH"),
        (["none.json"], "cannot be read"),
        ([records["ddp"], records["ddp"]], "the same run"),
        ([records["ddp"], "--nonsense"], "--nonsense"),
    ):
        done = lockstep("report", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert complaint in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_all_others_are_compared_with_the_one_that_is_named(records: dict[str, Path], tmp_path: Path) -> None:
    options = ["--output-dir", tmp_path / "out", "--opponent"]
    done = lockstep("report", *records.values(), *options, "single")
    assert done.returncode == 0, done.stderr
    (standing,) = Results.model_validate_json((tmp_path / "out" / "results.json").read_bytes()).standings
    assert [one.label for one in standing.placings] == ["single, 1 rank", "ddp, 2 ranks"]
    again = lockstep("report", *records.values(), "--overwrite", *options, "nobody")
    assert again.returncode == 2
    assert "--opponent 'nobody' was not ranked; choose one of ddp, single" in again.stderr
    assert len(again.stderr.strip().splitlines()) == 1


def _entered(record: RunRecord, number: int, name: str, role: Role) -> Run:
    """Returns a run of a race in which an entrant stands for something."""
    facts = RaceFacts(
        race="made up", purpose="timed", entrant=name, role=role, block=number, position=0, busy_share=0,
        gpu_processes=0, foreign_share=0.25, matmul_flops_per_second=None,
        core_slowdown={1: 1.1, 2: 1.21, 4: 1.4}[record.config.num_processes],
    )  # fmt: skip
    return Run(f"{name}-{number}.json", record, facts)


@pytest.mark.parametrize(("device", "has"), [("cpu", "with all cores"), ("cuda", "on one GPU")])
def test_what_is_no_backend_is_never_ranked(records: dict[str, Path], device: str, has: str) -> None:
    ddp, single = (_changed(records[one], lambda it: it["config"].update(device=device)) for one in ("ddp", "single"))
    roles: dict[str, tuple[RunRecord, Role]] = {
        "ddp": (ddp, "backend"),
        "single": (single, "backend"),
        "by hand": (ddp, "bare"),
        "another trainer": (ddp, "peer"),
        "independent processes": (ddp, "limit"),
        "single again": (single, "alternative"),
    }
    runs = [_entered(record, i, name, role) for name, (record, role) in roles.items() for i in range(3)]
    results = analyse(runs, [], ReportInfo("test"))
    (standing,) = results.standings
    assert standing.opponent == "ddp, 2 ranks"
    assert standing.core_slowdown == pytest.approx(1.1)  # relative to those with the fewest ranks
    assert [one.label for one in standing.placings] == ["ddp, 2 ranks", "single, 1 rank"]
    assert {one.label for one in standing.limits} == {"2 independent processes", f"one process {has}"}
    assert results.verdict[0].startswith("On 2 ranks of this machine, only ddp is ranked: ")
    assert "no loss to communication was shown" in results.verdict[1]  # they have the records of ddp
    assert results.idleness == Idleness(mean=0.25, largest=0.25)
    assert not any("hand" in sentence or "trainer" in sentence for sentence in results.verdict[:2])


def test_a_loop_stands_beside_its_own_entrant(records: dict[str, Path]) -> None:
    ddp = read_record(records["ddp"])
    roles: dict[str, Role] = {"ddp": "backend", "ddp (padded)": "backend", "ddp (slim)": "backend"}
    roles |= {"ddp (by hand)": "bare", "ddp (padded) (by hand)": "bare"}
    runs = [_entered(ddp, i, name, role) for name, role in roles.items() for i in range(3)]
    results = analyse(runs, [], ReportInfo("test"))
    assert [entrant.role for entrant in results.groups[0].entrants] == ["backend"] * 3
    assert [cost.name for cost in results.adapter_costs] == ["ddp", "ddp (padded)"]


def test_an_interval_knows_that_its_opponent_was_chosen_by_what_was_measured(records: dict[str, Path]) -> None:
    ddp, single = (read_record(records[name]) for name in ("ddp", "single"))
    rank = single.ranks[0]
    runs = [_entered(ddp, i, name, "backend") for name in ("ddp", "ddp (padded)") for i in range(3)]
    for i in range(3):
        slower = rank.model_copy(update={"step_seconds": [(1 + 0.05 * i) * second for second in rank.step_seconds]})
        runs.append(_entered(single.model_copy(update={"ranks": [slower]}), i, "single", "backend"))
    widths = []
    for name in (None, "ddp"):
        placing = analyse(runs, [], ReportInfo("test", opponent=name)).standings[0].placings[-1]
        assert placing.longer is not None
        widths.append(np.diff(np.log1p([placing.longer.low, placing.longer.high])).item())
    # Two pairs instead of one, with two degrees of freedom each: t(0.9875) / t(0.975).
    assert widths[0] / widths[1] == pytest.approx(6.2053 / 4.3027, rel=1e-3)


def test_a_report_says_if_no_race_made_its_runs(records: dict[str, Path]) -> None:
    ddp, single = (read_record(records[name]) for name in ("ddp", "single"))
    of_race = [_entered(one, i, one.config.backend, "backend") for one in (ddp, single) for i in range(3)]
    outside = [replace(run, race=None) for run in of_race]
    said = [analyse(runs, [], ReportInfo("test")).verdict for runs in (of_race, outside)]
    assert [any("Not all runs are those of a race" in one for one in sentences) for sentences in said] == [False, True]


def _on_four_ranks(content: dict[str, Any]) -> None:
    content["config"].update(num_processes=4, micro_batch_size=content["config"]["micro_batch_size"] // 2)
    content["ranks"] += [{**one, "rank": one["rank"] + 2} for one in content["ranks"]]


def _as_one_rank_of(ddp: RunRecord, single: RunRecord) -> RunRecord:
    """Returns the record of one process as if DDP had been its backend."""
    names = ("backend", "backend_settings", "start_method")
    return single.model_copy(
        update={"config": single.config.model_copy(update={name: getattr(ddp.config, name) for name in names})}
    )


def test_the_limit_of_other_numbers_of_ranks_is_not_theirs(records: dict[str, Path]) -> None:
    ddp, four = read_record(records["ddp"]), _changed(records["ddp"], _on_four_ranks)
    runs = [
        _entered(record, i, name, role)
        for record in (read_record(records["single"]), ddp, four)
        for name, role in (("ddp", "backend"), ("independent processes", "limit"))
        for i in range(3)
    ]
    results = analyse(runs, [], ReportInfo("test"))
    (standing,) = results.standings
    assert {one.label for one in standing.limits} >= {"2 independent processes", "4 independent processes"}
    assert results.verdict[1].count("no loss to communication was shown") == 1


def test_a_line_of_scaling_is_that_of_one_entrant(records: dict[str, Path]) -> None:
    single, ddp = read_record(records["single"]), read_record(records["ddp"])
    runs = [
        _entered(record, i, name, "backend") for record in (single, ddp) for name in ("ddp", "mine") for i in range(3)
    ]
    # One process was started as another backend here.
    assert analyse(runs, [], ReportInfo("test")).scaling == []
    as_ddp = _as_one_rank_of(ddp, single)
    runs = [
        _entered(record, i, name, "backend") for record in (as_ddp, ddp) for name in ("ddp", "mine") for i in range(3)
    ]
    lines = [one for one in analyse(runs, [], ReportInfo("test")).scaling if one.kind == "strong"]
    assert sorted(one.backend for one in lines) == ["ddp", "mine"]
    assert [[point.num_processes for point in one.points] for one in lines] == [[1, 2], [1, 2]]


def test_the_diagnosis_of_a_compiled_model_is_that_of_the_model_as_it_is(records: dict[str, Path]) -> None:
    def compiled(content: dict[str, Any]) -> None:
        content["config"]["torch_compile"] = True

    def diagnosed(content: dict[str, Any]) -> None:
        content["config"].update(diagnose=True, max_steps=11)

    diagnosis = _entered(_changed(records["ddp"], diagnosed), 0, "ddp", "backend")
    assert diagnosis.race is not None
    diagnosis = Run("d", diagnosis.record, diagnosis.race.model_copy(update={"purpose": "diagnosis"}))
    for change in (lambda content: None, compiled):
        timed = [_entered(_changed(records["ddp"], change), i, "ddp", "backend") for i in range(3)]
        (((entrant,), *_),) = (group_runs(located([*timed, diagnosis])),)
        assert entrant.diagnosis is not None


def test_networks_are_conditions_and_one_process_is_compared_with_each(records: dict[str, Path]) -> None:
    def on_two_nodes(network: str) -> Change:
        def change(content: dict[str, Any]) -> None:
            content["config"].update(num_nodes=2, master_addr="10.78.0.10")
            content["environment"]["network"] = network

        return change

    single = RunRecord.model_validate_json(records["single"].read_text())
    runs = [_entered(single, i, "single", "backend") for i in range(3)]
    for network in ("2 network namespaces, 100mbit", "2 network namespaces, 1gbit"):
        record = _changed(records["ddp"], on_two_nodes(network))
        runs += [_entered(record, i, "ddp", "backend") for i in range(3)]
    here = read_record(records["ddp"])  # on one node, which is as good as a network of its own
    runs += [_entered(here, i, "ddp", "backend") for i in range(3)]
    results = analyse(runs, [], ReportInfo("test"))
    networks = [one.network for one in results.standings]
    assert sorted(networks, key=str) == ["2 network namespaces, 100mbit", "2 network namespaces, 1gbit", None]
    for standing in results.standings:
        network = f" ({standing.network})" if standing.network else ""
        assert standing.conditions.endswith(f"samples a step{network}")
        assert [one.label for one in standing.placings] == ["ddp, 2 ranks", "single, 1 rank"]
    where = f" ({networks[0]})" if networks[0] else ""
    assert results.verdict[0].startswith(f"On 2 ranks of this machine{where}, only ddp is ranked")
    assert results_table(results).count("differs by network") == 1


def test_more_nodes_are_on_the_same_network(records: dict[str, Path]) -> None:
    def on_nodes(number: int) -> Change:
        def change(content: dict[str, Any]) -> None:
            if number == 4:
                _on_four_ranks(content)
            content["config"].update(num_nodes=number, master_addr="10.78.0.10")
            content["environment"]["network"] = f"{number} network namespaces, 1gbit"

        return change

    one = _as_one_rank_of(read_record(records["ddp"]), read_record(records["single"]))
    made = [one, *(_changed(records["ddp"], on_nodes(number)) for number in (2, 4))]
    results = analyse(
        [_entered(record, i, "ddp", "backend") for record in made for i in range(3)], [], ReportInfo("test")
    )
    (standing,) = results.standings
    assert {placing.num_processes for placing in standing.placings} == {1, 2, 4}
    (line,) = [one for one in results.scaling if one.kind == "strong"]
    assert line.condition.startswith("network namespaces, 1gbit, fp32")
    assert [point.num_processes for point in line.points] == [1, 2, 4]


def test_only_failures_make_no_report(records: dict[str, Path], tmp_path: Path) -> None:
    content = json.loads(records["ddp"].read_text())
    content.update(status="failed", error="no luck", ranks=[])
    (tmp_path / "failed.json").write_text(json.dumps(content))
    done = lockstep("report", "failed.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "no timed run completed" in done.stderr
