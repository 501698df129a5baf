"""Trainers of other libraries in a race: they rest, their real tokens are counted, and they reach something."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.numbers import NOTHING
from compare.race.directory import RaceDirectory
from compare.race.live import EntrantEnded, LiveEntrant
from compare.race.messages import Turn
from compare.race.peers.table import PEER_PROGRAM, PEERS, find_peer
from compare.race.report import is_decided
from compare.report.analysis import analyse
from compare.report.html import render_html
from compare.report.info import ReportInfo
from compare.report.markdown import render_markdown
from compare.report.peers import pseudo_values
from compare.report.runs import Purpose, RaceFacts, Run, TurnFacts, spent
from compare.report.sections import beside_the_ranking
from compare.results import Comparison, Interval, Results, Role, read_results
from launch.errors import UsageError
from launch.starters.interface import PROJECT_DIRECTORY
from records.record import RunRecord, read_record
from records.throughput import NUM_WARMUP_STEPS
from tests.forked.client import interpreter
from tests.launching import lockstep, require, train, wait_until
from tests.sample_peers import sample_peers
from tests.sample_results import empty_results, sample_results
from tests.sparing import in_ci
from tests.test_turns import _processes, _rests

NUM_ROWS = 96
NUM_STEPS = 24  # three epochs of eight steps
GROUPED = "trainer --train-sampling-strategy=group_by_length"


def require_peer(name: str) -> None:
    """Skips where its library is not installed, unless LOCKSTEP_REQUIRE lists it."""
    require(name, PEERS[name].row.unavailable_reason())


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a task that is learnt in a few steps: the first word is the label, and lengths differ widely."""
    file = tmp_path_factory.mktemp("texts") / "rows.csv"
    dice = random.Random(1)
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["text", "label"])
        for number in range(NUM_ROWS):
            label = ("good", "bad")[number % 2]
            rows.writerow([" ".join([label] * dice.randint(1, 60)), label])
    return [
        *(f"--train-file={file}", f"--validation-file={file}", "--global-batch-size=12", "--threads-per-rank=1"),
        *("--save-every=never", "--lr-scheduler=constant"),
    ]


_records: dict[str, RunRecord] = {}


def trained(peer: str, task: list[str], directory: Path) -> RunRecord:
    """Trains a peer alone, through three epochs on two ranks with two micro-steps; once for all tests."""
    name, *options = peer.split()
    require_peer(name)
    if peer not in _records:
        command = [interpreter(), "-m", "compare.race.entrant", PEER_PROGRAM, "-", name, *options, *task]
        command += ["--num-processes=2", "--num-train-epochs=3", "--micro-batch-size=3"]
        command.append(f"--output-dir={directory / 'run'}")
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_DIRECTORY)
        assert done.returncode == 0, done.stderr
        _records[peer] = read_record(directory / "run" / "record.json")
    return _records[peer]


@pytest.mark.parametrize(
    "peer",
    [
        "trainer",
        pytest.param(GROUPED, marks=pytest.mark.exhaustive),
        pytest.param("fabric", marks=pytest.mark.exhaustive),
    ],
)
def test_real_tokens_are_counted_step_by_step(peer: str, task: list[str], tmp_path: Path) -> None:
    record = trained(peer, task, tmp_path)
    assert len(record.ranks) == 2
    assert [step.num_samples for step in record.steps] == [12] * NUM_STEPS
    for epoch in range(3):
        steps = range(8 * epoch, 8 * (epoch + 1))
        assert sum(rank.tokens[step] for rank in record.ranks for step in steps) == record.task["num_tokens"]["train"]
    assert all(
        tokens <= positions
        for rank in record.ranks
        for tokens, positions in zip(rank.tokens, rank.positions, strict=True)
    )
    assert len({rank.weights_sha256 for rank in record.ranks}) == 1


@pytest.mark.parametrize("peer", ["trainer", pytest.param("fabric", marks=pytest.mark.exhaustive)])
def test_a_peer_learns_and_says_what_it_reaches(peer: str, task: list[str], tmp_path: Path) -> None:
    record = trained(peer, task, tmp_path)
    accuracy = record.quality["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.75


@pytest.mark.slow
def test_batches_of_equal_lengths_have_less_padding(task: list[str], tmp_path: Path) -> None:
    def positions(peer: str) -> int:
        return sum(sum(rank.positions) for rank in trained(peer, task, tmp_path / peer[:10]).ranks)

    assert positions(GROUPED) < 0.9 * positions("trainer")


@pytest.fixture(params=["trainer", pytest.param("fabric", marks=pytest.mark.exhaustive)])
def live(request: pytest.FixtureRequest, task: list[str], tmp_path: Path) -> Iterator[LiveEntrant]:
    require_peer(request.param)
    options = [request.param, *task, "--num-processes=2", f"--max-steps={NUM_STEPS}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(
        [*options, f"--output-dir={tmp_path / 'run'}"],
        num_processes=2,
        address=tmp_path / "socket",
        environment=environment,
        rank_program=PEER_PROGRAM,
    ) as entrant:
        entrant.get_ready()
        yield entrant


def test_a_peer_rests_between_its_turns(live: LiveEntrant, tmp_path: Path) -> None:
    assert live.steps_per_epoch == 8
    wait_until(lambda: _rests(tmp_path / "run"), "all of its processes to be stopped")
    before = live.cpu_seconds()
    time.sleep(1)
    assert live.cpu_seconds() == before
    taken = live.take(Turn(warm_through=2, through=10))
    assert len(taken) == 2
    assert all(len(one.ends) == 8 and one.began < one.ends[0] < one.ends[-1] for one in taken)
    assert all(one.cpu_seconds > 0 for one in taken)
    wait_until(lambda: _rests(tmp_path / "run"), "all of its processes to be stopped")
    time.sleep(2)  # which is no time of a step
    live.take(Turn(warm_through=12, through=NUM_STEPS))
    assert live.end() is None
    record = read_record(tmp_path / "run" / "record.json")
    assert all(max(rank.step_seconds[10:]) < 2 for rank in record.ranks)
    assert not _processes(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("live", in_ci(["fabric"], ["trainer", "fabric"]), indirect=True)
def test_a_peer_that_dies_is_named(live: LiveEntrant, tmp_path: Path) -> None:
    live.take(Turn(warm_through=1, through=5))
    os.kill(int((tmp_path / "run" / "logs" / "rank1.pid").read_text().split()[0]), signal.SIGKILL)
    with pytest.raises(EntrantEnded):
        live.take(Turn(warm_through=6, through=NUM_STEPS))
    assert live.end() is not None
    record = read_record(tmp_path / "run" / "record.json")
    assert record.status == "failed"
    assert "rank 1" in str(record.error)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 10)), min_size=1, max_size=20), st.floats(0.2, 5))
def test_a_constant_ratio_is_found_exactly(rounds: list[tuple[int, float]], ratio: float) -> None:
    pairs = [((tokens, seconds), (tokens, seconds * ratio)) for tokens, seconds in rounds]
    assert pseudo_values(pairs) == pytest.approx([math.log(ratio)] * len(rounds), abs=1e-9)


def test_a_long_round_counts_as_much_as_it_lasts() -> None:
    pairs = [((1000, 10.0), (1000, 20.0)), ((10, 0.1), (10, 0.1))]
    values = pseudo_values(pairs)
    assert sum(values) / len(values) == pytest.approx(math.log(2), abs=0.02)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    directory = tmp_path_factory.mktemp("adapter") / "run"
    train("single", directory, "--task", "token-tagging", "--max-steps", "40", "--threads-per-rank", "1")
    return read_record(directory / "record.json")


def _run(record: RunRecord, start: int, *, role: Role, seconds: float, purpose: Purpose = "timed") -> Run:
    """One start: ten steps of warm-up, and three turns of ten steps that take so many seconds each."""
    turns = [
        TurnFacts(
            round=number,
            position=0,
            first_step=10 * number + 1,
            num_steps=10,
            step_seconds=[seconds] * 10,
            cpu_seconds=1.0,
            instructions=2_000_000,
            foreign_share=0.0,
        )
        for number in range(4)
    ]
    race = RaceFacts(
        race="race",
        purpose=purpose,
        entrant="Another trainer" if role == "peer" else "single",
        role=role,
        block=start,
        position=0,
        busy_share=0.0,
        gpu_processes=0,
        foreign_share=0.0,
        matmul_flops_per_second=None,
        turns=turns if purpose == "timed" else [],
    )
    return Run(f"{role}-{purpose}-{start}", record.model_copy(update={"quality": {"accuracy": 0.8}}), race)


def test_a_peer_is_compared_by_its_real_tokens_and_not_ranked(adapter: RunRecord) -> None:
    half = [rank.model_copy(update={"tokens": [tokens // 2 for tokens in rank.tokens]}) for rank in adapter.ranks]
    peer = adapter.model_copy(update={"ranks": half})
    runs = [_run(adapter, start, role="backend", seconds=0.1) for start in (1, 2, 3)]
    runs += [_run(peer, start, role="peer", seconds=0.11) for start in (1, 2, 3)]
    runs += [_run(peer, 4, role="peer", seconds=0.1, purpose="whole")]
    results = analyse(runs, [], ReportInfo("test"))
    assert [entrant.name for group in results.groups for entrant in group.entrants] == ["single"]
    (comparison,) = results.peers
    ours, theirs = comparison.rows
    assert (comparison.opponent, ours.name, theirs.name) == ("single", "single", "Another trainer")
    assert ours.tokens_per_second is not None
    assert theirs.tokens_per_second is not None
    ratio = ours.tokens_per_second.estimate / theirs.tokens_per_second.estimate
    assert theirs.longer is not None
    assert 1 + theirs.longer.estimate == pytest.approx(ratio, rel=1e-3)
    assert 2.1 < ratio < 2.4
    assert theirs.claim == "slower"
    assert theirs.positions_per_token is not None
    assert ours.positions_per_token is not None
    assert theirs.positions_per_token > 1.9 * ours.positions_per_token
    for row, record in ((ours, adapter), (theirs, peer)):  # three turns, each of a second and two million instructions
        tokens = sum(sum(rank.tokens[10:40]) for rank in record.ranks)
        assert row.cpu_seconds_per_token == pytest.approx(3 / tokens)
        assert row.instructions_per_token == pytest.approx(6_000_000 / tokens)
    assert theirs.metrics == {"accuracy": 0.8}
    assert any("times Another trainer" in sentence for sentence in results.verdict)


def test_processor_time_without_turns_is_what_ranks_recorded(adapter: RunRecord) -> None:
    run, (rank,) = Run("alone", adapter, None), adapter.ranks
    assert spent([run], "cpu_seconds") == pytest.approx(sum(rank.step_cpu_seconds[NUM_WARMUP_STEPS:]))
    lacking = rank.model_copy(update={"step_cpu_seconds": []})  # as in records that are older than the field
    older = replace(run, record=adapter.model_copy(update={"ranks": [lacking]}))
    assert spent([run, older], "cpu_seconds") is None


def test_peers_meet_the_opponent_of_all_others(adapter: RunRecord) -> None:
    ddp = adapter.model_copy(update={"config": adapter.config.model_copy(update={"backend": "ddp"})})
    runs = [_run(adapter, start, role="backend", seconds=0.1) for start in (1, 2, 3)]
    slower = [_run(ddp, start, role="backend", seconds=0.12) for start in (1, 2, 3)]
    runs += [replace(run, race=run.race.model_copy(update={"entrant": "ddp"})) for run in slower if run.race]
    runs += [_run(adapter, start, role="peer", seconds=0.11) for start in (1, 2, 3)]
    for named in (None, "ddp"):
        results = analyse(runs, [], ReportInfo("test", opponent=named))
        assert [one.opponent for one in results.peers] == [named or "single"]
        assert results.standings[0].opponent == f"{named or 'single'}, 1 rank"
        (other,) = results.peers[0].others  # the backend that is not the opponent
        assert (other.first, other.second) == ("single" if named else "ddp", "Another trainer")
        assert other.slowdown is not None
        assert other.slowdown.estimate == pytest.approx(0.11 / (0.1 if named else 0.12) - 1)


def test_peers_are_in_the_order_of_the_conditions_of_the_others(adapter: RunRecord) -> None:
    bf16 = adapter.model_copy(update={"config": adapter.config.model_copy(update={"precision": "bf16"})})
    runs = [_run(one, start, role="backend", seconds=0.1) for one in (adapter, bf16) for start in (1, 2, 3)]
    runs += [_run(one, start, role="peer", seconds=0.1) for one in (bf16, adapter) for start in (1, 2, 3)]
    results = analyse(runs, [], ReportInfo("test", conditions=(("fp32", 1), ("bf16", 1))))
    assert ["fp32" in one.group for one in results.peers] == [True, False]


def test_pages_show_peers_under_a_heading_of_their_own() -> None:
    results = sample_results()
    section = next(section for section in beside_the_ranking(results) if section.id == "peers")
    rows = [[cell.text for cell in row.cells] for row in section.sections[0].blocks[-1].rows]
    assert rows[1][2] == "1.62 [1.58, 1.66]"
    assert "perhaps as fast" in rows[2][2]
    assert [row[3] for row in rows] == ["191", "310", "194", NOTHING]
    assert [row[4] for row in rows] == ["53.2", "86.2", "53.8", NOTHING]
    assert "rank 1 ended" in section.sections[0].blocks[0].items[0]
    markdown = render_markdown(results)
    assert f"## {section.heading}" in markdown
    assert "| transformers.Trainer | 5,800 \\[5,684, 5,916\\] | 1.62 \\[1.58, 1.66\\] |" in markdown


def test_pages_of_older_results_have_no_processor_time_of_peers() -> None:
    content = json.loads(sample_results().model_dump_json())
    for row in content["peers"][0]["rows"]:
        del row["cpu_seconds_per_token"], row["instructions_per_token"]
    older = Results.model_validate_json(json.dumps(content))
    section = next(section for section in beside_the_ranking(older) if section.id == "peers")
    columns = " ".join(section.sections[0].blocks[-1].columns)
    assert "CPU time" not in columns
    assert "instructions" not in columns
    assert "CPU time for a million real tokens" not in render_markdown(older) + render_html(older)


def _other(first: str, second: str, slowdown: Interval) -> Comparison:
    """What was found of a backend that is not the opponent, beside a peer."""
    return Comparison(
        first=first,
        second=second,
        num_pairs=3,
        slowdown=slowdown,
        claim="slower",
        text="",
        detectable=None,
        more_repeats=None,
    )


def test_pages_show_the_other_backends_beside_peers_too() -> None:
    results = sample_results()
    peers = ("transformers.Trainer", "Lightning Fabric")
    results.peers[0].others = [
        _other(name, peer, Interval(estimate=longer, low=longer - 0.02, high=longer + 0.02))
        for name, seconds in (("horovod", 1.0), ("accelerate", 1.25))
        for peer, longer in zip(peers, (2.0 / seconds - 1, 1.5 / seconds - 1), strict=True)
    ]
    section = next(section for section in beside_the_ranking(results) if section.id == "peers")
    table = section.sections[0].blocks[-1]
    assert table.columns == ["backend", *(f"is so many times as fast as {peer} [95 %]" for peer in peers)]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["horovod", "2.00 [1.98, 2.02]", "1.50 [1.48, 1.52]"],
        ["accelerate", "1.60 [1.58, 1.62]", "1.20 [1.18, 1.22]"],
    ]
    assert "| accelerate | 1.60 \\[1.58, 1.62\\] | 1.20 \\[1.18, 1.22\\] |" in render_markdown(results)


def test_a_race_is_not_decided_before_all_backends_are_known_beside_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = sample_peers("here", "another")
    peers.rows = peers.rows[:2]  # of which the difference is known to 4 %
    peers.others = [_other("accelerate", "transformers.Trainer", Interval(estimate=0.1, low=0.0, high=0.2))]
    results = empty_results().model_copy(update={"peers": [peers]})
    monkeypatch.setattr("compare.report.analysis.analyse", lambda *_: results)
    assert not is_decided(RaceDirectory(tmp_path), within=0.05)
    assert is_decided(RaceDirectory(tmp_path), within=0.15)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--peers", "nobody"], "--peers nobody: there is no such peer; choose trainer, fabric"),
        (["--peers", "trainer,"], "--peers"),
        (["--peers", "trainer", "--precision", "fp16"], "trainer cannot compute in fp16 on cpu"),
        (["--peers", "trainer", "--task", "token-tagging"], "token-tagging has no hugging_face_dataset"),
    ],
)
def test_bad_requests_end_with_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = lockstep("compare", "--backends", "ddp", "--num-processes", "2", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.race.peers.table.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="lightning_fabric is not installed; pip install 'lightning-fabric"):
        find_peer("fabric")


@pytest.mark.slow
def test_peers_take_turns_and_train_to_the_end(task: list[str], tmp_path: Path) -> None:
    names = [name for name, peer in PEERS.items() if peer.row.unavailable_reason() is None]
    command = ["--backends", "ddp", "--peers", ",".join(names), "--num-processes", "1", "--no-limits", *task[:2]]
    command += [*task[2:4], "--timed-steps", "20", "--repeats", "3", "--no-diagnosis", "--no-wait-for-idle"]
    done = lockstep("compare", *command, "--output-dir", tmp_path / "race")
    assert done.returncode == 0, done.stderr
    (comparison,) = read_results(tmp_path / "race" / "results.json").peers
    called = [variant for name in names for variant in PEERS[name].variants]
    assert [row.name for row in comparison.rows[1:]] == sorted(called, key=str)
    assert comparison.num_epochs == 1
    assert comparison.num_starts == 3
    for row in comparison.rows:
        assert row.tokens_per_second is not None
        assert row.metrics["accuracy"] is not None
        assert row.positions_per_token is not None
        assert row.positions_per_token > 1
        assert row.cpu_seconds_per_token is not None
        assert row.cpu_seconds_per_token > 0
