"""A real race of good, bad and failing adapters: how it is run, what it says, what a second call does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compare.race.directory import RaceDirectory
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, PlannedRun, RacePlan, draw_plan
from compare.report.reading import read_inputs, read_run
from compare.report.runs import RaceFacts, race_file
from compare.results import Results
from launch.errors import UsageError
from launch.run_directory import locked
from launch.starters.interface import PROJECT_DIRECTORY
from records.environment import describe_environment, num_cpus
from records.record import RunRecord, read_record, write_record
from tests.forked.client import forked_lockstep
from tests.launching import LOCKSTEP, lockstep, require_backend, run_config, wait_until
from tests.test_lifetimes import wait_until_gone

STRAYING, FAILING = "tests.variants_of_ddp:StrayingDDP", "tests.variants_of_ddp:FailingDDP"
SLIM = "fabric (--bucket-cap-mb 1)"  # a peer has the name of this backend, too
SHORT = ["--task", "token-tagging", "--timed-steps", "12", "--diagnosis-steps", "10", "--no-collectives"]
SHORT += ["--no-wait-for-idle", "--global-batch-size", "16"]
RACE = ["--backends", f"single,ddp,horovod,accelerate,{STRAYING},{FAILING}", "--repeats", "3", *SHORT]
RACE += ["--num-processes=2", "--entrant=patient=horovod:HOROVOD_CYCLE_TIME=3", "--entrant=fabric:--bucket-cap-mb 1"]


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("ddp", "horovod", "accelerate", "fabric"):
        require_backend(name)
    directory = tmp_path_factory.mktemp("race") / "race"
    done = lockstep("compare", *RACE, "--output-dir", directory)
    assert done.returncode == 0, done.stderr + done.stdout
    return directory


@pytest.fixture(scope="module")
def results(race: Path) -> Results:
    return Results.model_validate_json((race / "results.json").read_bytes())


def _entrants(results: Results) -> dict[str, Any]:
    return {entrant.name: entrant for group in results.groups for entrant in group.entrants}


@pytest.mark.slow
def test_good_backends_are_in_lockstep_and_ranked(results: Results) -> None:
    entrants = _entrants(results)
    assert entrants["single"].parity.verdict == "reference"
    for name in ("ddp", "horovod", "accelerate", SLIM):
        assert entrants[name].parity.verdict in ("bitwise", "rounding"), entrants[name].parity
        assert entrants[name].ranked
        assert entrants[name].num_runs == 3
        assert all(len(seconds) == 12 - 5 for seconds in entrants[name].step_seconds)
        assert entrants[name].breakdown is not None  # so its diagnosis is known to be of the same entrant
    assert "same bits as horovod, horovod (patient), accelerate" in entrants["ddp"].parity.detail


@pytest.mark.slow
def test_a_backend_out_of_lockstep_is_shown_and_not_ranked(results: Results) -> None:
    straying = _entrants(results)[STRAYING]
    assert straying.parity.verdict == "not comparable"
    assert straying.parity.first_step == 1
    assert "gradient norm" in straying.parity.detail
    assert not straying.ranked
    assert straying.samples_per_second is not None
    named = {name for group in results.groups for one in group.comparisons for name in (one.first, one.second)}
    assert STRAYING not in named
    assert f"Not ranked, because of a computation that differs: {STRAYING}." in results.verdict


@pytest.mark.slow
def test_a_backend_that_fails_is_a_marked_row(race: Path, results: Results) -> None:
    assert any("planted failure" in problem and "rank" in problem for problem in results.problems)
    assert "planted failure" in (race / "report.md").read_text().replace("\\", "")
    assert list((race / "failed").glob("*/logs/*.log"))


@pytest.mark.slow
def test_all_ways_are_compared(results: Results) -> None:
    (group,) = [group for group in results.groups if group.group.num_processes == 2]
    pairs = {(one.first, one.second) for one in group.comparisons}
    assert len(pairs) == 10
    assert all(one.num_pairs == 3 for one in group.comparisons)


@pytest.mark.slow
def test_what_was_in_force_is_read_from_the_processes(results: Results) -> None:
    entrants = _entrants(results)
    assert entrants["ddp"].settings["transport"] == "gloo"
    assert entrants["horovod"].settings["cycle_time_ms"] == 1.0
    assert entrants["horovod (patient)"].settings["cycle_time_ms"] == 3.0
    assert entrants["horovod (patient)"].ranked
    assert entrants["horovod (patient)"].own_settings == ["HOROVOD_CYCLE_TIME=3"]
    said = [sentence for sentence in results.verdict if sentence.startswith("Settings of their own")]
    assert said == ["Settings of their own: horovod (patient): HOROVOD_CYCLE_TIME=3."]  # the name of SLIM says it
    assert (entrants[SLIM].settings["bucket_bytes"], entrants[SLIM].settings["start_method"]) == (2**20, "fork")
    commands = results.commands
    assert commands["a timed run of horovod (patient)"].startswith("HOROVOD_CYCLE_TIME=3 launch/run.sh horovod ")
    assert commands["a timed run of horovod"].startswith("launch/run.sh horovod ")
    for name in ("ddp", "horovod", "accelerate"):
        settings = entrants[name].settings
        assert settings["threads_per_rank"] == 1
        assert settings["inner_dtype"] == "float64"
        assert settings["schedule_steps"] == 12
        assert entrants[name].mean_step_cpu_seconds > 0
        wire = entrants[name].wire
        assert wire.ring_bound == wire.gradient_bytes
        assert wire.bytes_per_step > wire.ring_bound  # other programs, too, send on this interface
    (group,) = [group for group in results.groups if group.group.num_processes == 2]
    assert "cycle_time_ms" in group.differing_settings
    assert "threads_per_rank" not in group.differing_settings


@pytest.mark.slow
def test_what_is_possible_here_takes_part(results: Results) -> None:
    entrants = _entrants(results)
    apart, whole = entrants["independent processes"], entrants["single (all cores)"]
    assert (apart.role, apart.ranked, apart.num_runs) == ("limit", False, 3)
    assert apart.samples_per_second.estimate > 0
    assert (whole.role, whole.ranked, whole.num_runs) == ("alternative", True, 3)
    assert whole.settings["threads_per_rank"] == num_cpus()
    (standing,) = results.standings
    assert "ddp, 2 ranks" in {placing.label for placing in standing.placings}
    assert {placing.label for placing in standing.limits} == {"2 independent processes", "one process with all cores"}


@pytest.mark.slow
def test_a_step_is_broken_down(results: Results) -> None:
    breakdown = (entrant := _entrants(results)["ddp"]).breakdown
    assert min(breakdown.forward, breakdown.backward, breakdown.optimizer, breakdown.overhead + 1) > 0
    assert breakdown.total == pytest.approx(entrant.median_step_seconds)


@pytest.mark.slow
def test_blocks_hold_every_entrant_once_in_an_order_of_their_own(race: Path) -> None:
    blocks: dict[int, list[tuple[int, str]]] = {}
    for path in RaceDirectory(race).records():
        run = read_run(path)
        assert run.race is not None
        if run.purpose == "timed" and run.is_usable:
            blocks.setdefault(run.race.block, []).append((run.race.position, run.entrant))
    assert sorted(blocks) == [1, 2, 3]
    orders = [tuple(name for _, name in sorted(runs)) for runs in blocks.values()]
    assert len({frozenset(order) for order in orders}) == 1
    assert len(set(orders)) > 1


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_is_refused(race: Path) -> None:
    records = sorted((race / "records").iterdir())
    gone = [path for path in records if path.name.startswith("timed-002")]  # they took turns, and do so again
    before = {path: path.stat().st_mtime_ns for path in records if path not in gone}
    for path in gone:
        path.unlink()
    other = lockstep("compare", *RACE, "--order-seed", "1", "--output-dir", race)
    assert other.returncode == 2
    assert "holds another race" in other.stderr
    again = lockstep("compare", *RACE, "--output-dir", race)
    assert again.returncode == 0, again.stderr
    assert "resuming the race" in again.stdout
    assert all(path.exists() for path in gone)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.mark.slow
def test_an_interrupted_race_ends_at_once_and_says_how_to_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "race"
    command = [str(LOCKSTEP), "compare", "--backends", "single", "--num-processes", "1", *SHORT]
    command += ["--output-dir", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(directory.glob("records/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM
    assert "finished runs are kept, resume with: launch/run.sh compare" in errors
    assert f"--output-dir {directory}" in errors
    assert list(directory.glob("records/*.json"))
    assert not (directory / "running").exists()
    assert not (directory / "results.json").exists()


@pytest.mark.slow
def test_a_killed_race_leaves_nothing_to_its_resume(tmp_path: Path) -> None:
    """Killed in the middle of a run and called again at once: no record but of runs that the second call started."""
    directory = tmp_path / "race"
    options = ["compare", "--backends", "ddp", "--num-processes", "2", "--no-limits", *SHORT]
    options += ["--output-dir", str(directory)]
    first = subprocess.Popen([str(LOCKSTEP), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(directory.glob("running/*/logs/rank1.pid")) and time.monotonic() < deadline:
        time.sleep(0.02)
    (orphan,) = directory.glob("running/*")
    finished = set(RaceDirectory(directory).records())
    first.kill()
    first.wait()
    killed_at = time.time()
    # What it starts anew is forked, which takes less time.
    second = subprocess.Popen(
        [*forked_lockstep(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_until_gone(orphan)
    _, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    records = [read_record(path) for path in set(RaceDirectory(directory).records()) - finished]
    plan = RacePlan.model_validate_json((directory / "plan.json").read_bytes())
    assert 0 < len(records) == len(plan.runs()) - len(finished)
    assert all(record.config.started_at > killed_at for record in records)
    directories = {record.config.output_dir for record in records}
    assert len(directories) == len(records)
    assert orphan not in directories
    assert not (directory / "running").exists()


def test_a_race_waits_for_what_an_earlier_call_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the directory of a run that is locked nor that of one whose rank lives is touched."""
    monkeypatch.setattr("compare.race.directory._SECONDS_FOR_ORPHANS", 0.3)
    directory = RaceDirectory(tmp_path)
    run = directory.running("1234")
    directory.await_orphans()
    with locked(run), pytest.raises(UsageError, match=f"still going on .process {os.getpid()}.; end that process"):
        directory.await_orphans()
    directory.await_orphans()
    (run / "logs").mkdir()
    code = "import sys, time; from pathlib import Path; from watch.rank_files import RankFiles\n"
    code += "RankFiles(Path(sys.argv[1]), 0).announce(); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=PROJECT_DIRECTORY)
    try:
        wait_until(lambda: (run / "logs" / "rank0.pid").exists(), "a rank", job=rank)
        with pytest.raises(UsageError, match=f"process {rank.pid}"):
            directory.await_orphans()
    finally:
        rank.kill()
        rank.wait()
    directory.await_orphans()


def _facts(run: PlannedRun) -> RaceFacts:
    return RaceFacts(
        race="r",
        purpose=run.purpose,
        block=run.block,
        position=run.position,
        busy_share=0.0,
        gpu_processes=0,
        foreign_share=0.0,
        matmul_flops_per_second=None,
    )


def test_what_a_race_knows_of_a_run_lies_beside_its_record(tmp_path: Path) -> None:
    """The record is kept byte for byte; that of a failed run too, and both are read with what lies beside them."""
    who = Entrant(backend="single", num_processes=1, precision="fp32", accumulation=1, global_batch_size=32)
    good, bad = (PlannedRun(entrant=who, purpose="timed", block=block, position=0) for block in (1, 2))
    directory = RaceDirectory(tmp_path)
    directory.record(good).parent.mkdir()
    written = {}
    for run in (good, bad):
        output_dir = directory.running(run.name)
        output_dir.mkdir(parents=True)
        config = run_config("single", 1, output_dir, micro_batch_size=32)
        content = {"status": "failed", "error": "no luck", "config": config, "gradient_accumulation_steps": 1}
        content |= {"task": {}, "environment": describe_environment(with_torch=False), "quality": {}}
        content |= {"seconds_to_first_step": None, "seconds": 1.0, "steps": [], "evaluations": [], "ranks": []}
        write_record(RunRecord.model_validate(content), output_dir)
        written[run] = (output_dir / "record.json").read_bytes()
    directory.keep_failure(bad, directory.running(bad.name), _facts(bad), "no luck")
    directory.keep(good, directory.running(good.name), _facts(good))
    kept = directory.records()
    assert [path.read_bytes() for path in kept] == [written[good], written[bad]]
    assert [read_run(path).race for path in kept] == [_facts(good), _facts(bad)]
    assert kept[0] == directory.record(good)
    # Both may be named to a report; what a race wrote is of use only with its record.
    both = [kept[0], race_file(kept[0])]
    assert [run.race for run in read_inputs(both).runs] == [_facts(good)]
    with pytest.raises(UsageError, match=r"also pass the record it belongs to$"):
        read_inputs([race_file(kept[0])])


def test_the_directory_of_a_race_of_an_earlier_version_is_refused_in_a_line(tmp_path: Path) -> None:
    plan = {"options": {}, "entrants": [], "run_options": [], "diagnosis_options": [], "left_out": []}
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "command": "launch/run.sh compare", "race": "r"}))
    done = lockstep("compare", "--backends", "single", "--output-dir", tmp_path)
    assert done.returncode == 2
    assert "plan.json is not the plan of a race of this version of Lockstep" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.slow
def test_a_race_that_nobody_survives_makes_no_report(tmp_path: Path) -> None:
    done = lockstep("compare", "--backends", FAILING, "--no-limits", *SHORT, "--output-dir", tmp_path / "race")
    assert done.returncode == 1
    assert "no timed run completed" in done.stderr
    assert "planted failure" in done.stderr
    assert not (tmp_path / "race" / "report.html").exists()


@pytest.mark.slow
def test_entrants_that_go_wrong_between_their_turns_are_named_and_the_others_race_on(tmp_path: Path) -> None:
    faults = ("hangs", "diverges", "runs-out-of-memory")
    options = ["--backends", "ddp", "--no-limits", "--no-diagnosis", "--hang-timeout", "5", "--num-processes", "2"]
    for fault in faults:
        options += ["--entrant", f"{fault}=tests.faulty_backends:FaultyDDP:--fault {fault}"]
    done = lockstep("compare", *options, *SHORT, "--repeats", "3", "--output-dir", tmp_path / "race")
    assert done.returncode == 0, done.stderr
    results = Results.model_validate_json((tmp_path / "race" / "results.json").read_bytes())
    entrants = _entrants(results)
    assert entrants["ddp"].num_runs == 3
    failures = {fault: [line for line in results.problems if f"({fault}) failed" in line] for fault in faults}
    assert all("rank 1" in line and "hangs" in line for line in failures["hangs"])
    assert all("the loss of step 9 is nan" in line for line in failures["diverges"])
    assert all("rank 1" in line and "ran out of memory" in line for line in failures["runs-out-of-memory"])
    # Who has failed twice is not started again.
    assert {fault: len(lines) for fault, lines in failures.items()} == dict.fromkeys(faults, 2)
    assert not (tmp_path / "race" / "running").exists()


def test_the_order_is_drawn_from_its_seed_alone() -> None:
    entrants = [
        Entrant(backend=name, num_processes=2, precision="fp32", accumulation=1, global_batch_size=32)
        for name in ("a", "b", "c", "d")
    ]
    plan = draw_plan(entrants, RaceOptions(), repeats=20)
    assert plan == draw_plan(entrants, RaceOptions(), repeats=20)
    assert plan != draw_plan(entrants, RaceOptions(order_seed=1), repeats=20)
    firsts = {run.entrant.backend for run in plan if run.purpose == "timed" and run.position == 0}
    assert firsts == {"a", "b", "c", "d"}
    references = [run.entrant for run in plan if run.purpose == "diagnosis" and run.entrant.backend == "single"]
    assert {entrant.micro_batch_size for entrant in references} == {32, 16}
    assert len({run.name for run in plan}) == len(plan)


def test_an_entrant_with_padded_batches_meets_a_reference_with_padded_batches() -> None:
    conditions: dict[str, Any] = {"num_processes": 2, "precision": "fp32", "accumulation": 1, "global_batch_size": 32}
    entrant = Entrant(backend="ddp", variant="mine", options=("--allocator=glibc", "--batching=padded"), **conditions)
    plan = draw_plan([entrant], RaceOptions(), repeats=1)
    references = [run.entrant for run in plan if run.purpose == "diagnosis" and run.entrant.backend == "single"]
    assert {(one.name, one.micro_batch_size, one.options) for one in references} == {
        ("single", 32, ()),
        ("single (padded)", 16, ("--batching=padded",)),
    }


@pytest.mark.parametrize(
    ("peers", "ends"), [(["trainer"], {"fp32", "bf16"}), (None, {"fp32"})], ids=["peers", "backends"]
)
def test_what_a_peer_reaches_is_seen_in_each_precision(peers: list[str] | None, ends: set[str]) -> None:
    """Backends in lockstep reach the same, so that one precision of them is enough."""
    entrants = [
        Entrant(backend=name, role=role, num_processes=2, precision=precision, accumulation=1, global_batch_size=32)
        for precision in ("fp32", "bf16")
        for name, role in [("ddp", "backend"), *([("trainer", "peer")] if peers else [])]
    ]
    plan = draw_plan(entrants, RaceOptions(peers=peers, whole_runs=True), repeats=1)
    ended = [(run.entrant.name, run.entrant.precision) for run in plan if run.purpose == "whole"]
    assert sorted(ended) == sorted((name, end) for name in {one.name for one in entrants} for end in ends)


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_creates_nothing(tmp_path: Path) -> None:
    asked = ("--dry-run", "--backends", "single,ddp", "--num-processes", "2", *SHORT)
    done = lockstep("compare", *asked, "--output-dir", tmp_path / "race")
    assert done.returncode == 0, done.stderr
    assert "3 timed" in done.stdout
    assert "independent processes" in done.stdout
    assert "single (all cores)" in done.stdout
    assert "estimated from a few steps taken now" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = lockstep("compare", "--backends", "single", "--output-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")  # nothing was measured before
    assert "is not empty and does not contain a race" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_schema_of_results_is_the_one_in_force() -> None:
    schema = json.loads((PROJECT_DIRECTORY / "compare" / "results.schema.json").read_text())
    assert schema == Results.model_json_schema()
