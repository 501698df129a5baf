"""Entrants that stay alive and take turns: how turns are cut, how the budget is spent, and what resting means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.race.collectives import seconds_of_collectives
from compare.race.command import run as run_compare
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.heat import next_turn
from compare.race.live import EntrantEnded, LiveEntrant
from compare.race.messages import Turn
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, draw_plan, heats_of
from compare.race.report import is_decided
from compare.race.schedule import make_schedule
from compare.report.entrants import _of_a_step, _timed_steps
from compare.report.grouping import EntrantRuns
from compare.report.pairing import paired
from compare.report.parts import as_one_part
from compare.report.reading import read_run
from compare.report.runs import RaceFacts, Run, TurnFacts
from launch.errors import UsageError
from launch.guardian import __file__ as guardian_file
from launch.starters.interface import PROJECT_DIRECTORY
from records.environment import describe_environment
from records.record import RunRecord
from tests.launching import LOCKSTEP, lockstep, require_backend, run_config, wait_until
from tests.test_lifetimes import wait_until_gone

NUM_STEPS = 30
TINY = ["--task", "token-tagging", "--global-batch-size", "16", "--threads-per-rank", "1", "--save-every", "never"]


@given(
    warm=st.integers(1, 20),
    timed=st.integers(1, 60),
    steps_per_epoch=st.integers(1, 300),
    num_steps=st.integers(1, 900),
)
def test_turns_cover_all_steps_and_cross_no_epoch(warm: int, timed: int, steps_per_epoch: int, num_steps: int) -> None:
    taken = 0
    while taken < num_steps:
        turn = next_turn(taken, warm, timed, steps_per_epoch=steps_per_epoch, num_steps=num_steps)
        assert taken < turn.through <= num_steps
        assert taken <= turn.warm_through < turn.through
        assert turn.warm_through > taken or turn.through == taken + 1  # the one step that an epoch leaves
        assert taken // steps_per_epoch == (turn.through - 1) // steps_per_epoch
        assert turn.through - taken < 2 * (warm + timed)
        taken = turn.through


def _costs(step: float = 0.05, available: int = 2**35) -> Costs:
    return Costs(
        step_seconds={"fp32, 1, 32": step},
        evaluation_seconds=1.0,
        import_seconds=2.0,
        steps_of_whole=1000,
        gradient_bytes=2_500_000,
        bandwidth=None,
        num_cpus=2,
        rank_bytes=2**29,
        available_bytes=available,
    )


def _entrants(*names: str, num_processes: int = 2) -> list[Entrant]:
    return [
        Entrant(backend=name, num_processes=num_processes, precision="fp32", accumulation=1, global_batch_size=32)
        for name in names
    ]


def test_a_budget_is_spent_and_not_exceeded() -> None:
    options = [RaceOptions(budget=minutes * 60.0, num_processes=[2]) for minutes in (5, 10, 20)]
    schedules = [make_schedule(_entrants("a", "b"), one, _costs(), seconds_of_tuning=0.0) for one in options]
    for one, schedule in zip(options, schedules, strict=True):
        assert 0.9 * one.budget < schedule.seconds <= one.budget
        assert schedule.repeats >= 3
    assert schedules[0].timed_steps * schedules[0].repeats < schedules[2].timed_steps * schedules[2].repeats


def test_time_is_kept_for_the_collectives_of_libraries_that_have_some() -> None:
    worlds = RaceOptions(num_processes=[1, 2, 4])
    assert seconds_of_collectives(_entrants("fsdp2", "accelerate"), worlds) == 0
    one, two = (seconds_of_collectives(_entrants(*names), worlds) for names in (["ddp"], ["ddp", "horovod", "single"]))
    assert two == 2 * one > 0
    assert seconds_of_collectives(_entrants("ddp"), worlds.model_copy(update={"collectives": False})) == 0


def test_what_the_user_sets_is_not_planned() -> None:
    options = RaceOptions(repeats=4, timed_steps=77, num_processes=[2])
    schedule = make_schedule(_entrants("a", "b"), options, _costs(), seconds_of_tuning=0.0)
    assert (schedule.repeats, schedule.timed_steps) == (4, 77)
    schedule = make_schedule(
        _entrants("a", "b"), options.model_copy(update={"timed_steps": None}), _costs(), seconds_of_tuning=0.0
    )
    assert schedule.repeats == 4
    assert schedule.timed_steps > 77


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match=r"--budget 60s: 2 entrants, each started 3 times, need about \d+min"):
        make_schedule(_entrants("a", "b"), RaceOptions(budget=60.0, num_processes=[2]), _costs(), seconds_of_tuning=0.0)


def test_a_race_without_a_budget_takes_the_time_that_it_needs() -> None:
    slow = _costs().model_copy(update={"import_seconds": 120.0})
    with pytest.raises(UsageError, match="--budget 10min"):
        make_schedule(_entrants("a", "b"), RaceOptions(budget=600.0, num_processes=[2]), slow, seconds_of_tuning=0.0)
    schedule = make_schedule(_entrants("a", "b"), RaceOptions(num_processes=[2]), slow, seconds_of_tuning=0.0)
    assert schedule.repeats == 3
    assert schedule.seconds > 600


def test_a_start_has_several_turns_also_where_a_step_takes_long() -> None:
    """A turn is four steps at least, of which one is not timed."""
    slow = make_schedule(
        _entrants("a", "b"),
        RaceOptions(budget=1200.0, diagnosis_steps=10, num_processes=[2]),
        _costs(step=2.0),
        seconds_of_tuning=0.0,
    )
    assert slow.timed_steps >= 5 + 5 * 4
    assert slow.seconds <= 1200
    assert slow.repeats >= 3


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveEntrant]:
    options = ["ddp", *TINY, "--num-processes=2", f"--max-steps={NUM_STEPS}", f"--output-dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=2, address=tmp_path / "socket", environment=environment) as entrant:
        entrant.get_ready()
        yield entrant


def _processes(run: Path) -> dict[int, str]:
    """Returns the state of each process that works for the run, except for guardians."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(str(run) in word for word in words) and guardian_file not in words:
                found[process.pid] = process.status()
        except psutil.Error:
            continue
    return found


def _rests(run: Path) -> bool:
    """Whether all processes of the run are stopped; on a busy machine that takes a moment."""
    return set(_processes(run).values()) == {psutil.STATUS_STOPPED}


def test_an_entrant_rests_between_its_turns_and_ends_by_itself(tmp_path: Path, live: LiveEntrant) -> None:
    resting = _processes(tmp_path / "run")
    assert len(resting) >= 4  # the command line, the starter and two ranks
    wait_until(lambda: _rests(tmp_path / "run"), "all of its processes to be stopped")
    before = live.cpu_seconds()
    time.sleep(1)
    assert live.cpu_seconds() == before
    ranks = [int(path.read_text().split()[0]) for path in (tmp_path / "run" / "logs").glob("rank*.pid")]
    assert len(ranks) == 2
    launchers = [psutil.Process(pid) for pid in resting if pid not in ranks]
    switches = [process.num_ctx_switches() for process in launchers]
    taken = live.take(Turn(warm_through=2, through=10))
    assert len(launchers) >= 2  # the command line and the starter, which do not go on
    assert [process.num_ctx_switches() for process in launchers] == switches
    assert len(taken) == 2
    assert all(len(one.ends) == 8 and one.began < one.ends[0] < one.ends[-1] for one in taken)
    assert all(one.cpu_seconds > 0 for one in taken)
    wait_until(lambda: _rests(tmp_path / "run"), "all of its processes to be stopped")
    time.sleep(2)  # which is no time of a step
    live.take(Turn(warm_through=12, through=NUM_STEPS))
    assert live.end() is None
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "completed"
    assert len(record["steps"]) == NUM_STEPS
    assert all(max(rank["step_seconds"][1:]) < 2 for rank in record["ranks"])


@pytest.mark.slow
def test_threads_that_poll_rest_too(tmp_path: Path) -> None:
    """Horovod's threads look for work once a millisecond as long as they run."""
    require_backend("horovod")
    options = ["horovod", *TINY, "--num-processes=2", f"--max-steps={NUM_STEPS}", f"--output-dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=2, address=tmp_path / "socket", environment=environment) as entrant:
        entrant.get_ready()
        wait_until(lambda: _rests(tmp_path / "run"), "all of its processes to be stopped")
        before = entrant.cpu_seconds()
        time.sleep(2)
        assert entrant.cpu_seconds() - before < 0.005 * 2  # half a per cent of a core
        entrant.take(Turn(warm_through=2, through=NUM_STEPS))
        assert entrant.end() is None


def test_an_entrant_whose_rank_dies_while_it_rests_is_named(tmp_path: Path, live: LiveEntrant) -> None:
    live.take(Turn(warm_through=1, through=5))
    os.kill(int((tmp_path / "run" / "logs" / "rank1.pid").read_text().split()[0]), signal.SIGKILL)
    with pytest.raises(EntrantEnded):
        live.take(Turn(warm_through=6, through=NUM_STEPS))
    why = live.end()
    assert why is not None
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert "rank 1" in record["error"]


def test_an_entrant_that_hangs_in_its_turn_is_found_by_its_launcher(tmp_path: Path) -> None:
    options = ["ddp", *TINY, "--num-processes=2", f"--max-steps={NUM_STEPS}", f"--output-dir={tmp_path / 'run'}"]
    options += ["--task", "tests.faulty:HangingTask", "--fault", "loops", "--hang-timeout", "5"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=2, address=tmp_path / "socket", environment=environment) as entrant:
        entrant.get_ready()
        with pytest.raises(EntrantEnded):
            entrant.take(Turn(warm_through=1, through=NUM_STEPS))
        entrant.end()
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert "rank 1" in record["error"]
    assert "hangs" in record["error"]


def test_an_entrant_that_cannot_start_says_why(tmp_path: Path) -> None:
    options = ["ddp", *TINY, "--num-processes=2", "--nonsense", f"--output-dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=2, address=tmp_path / "socket", environment=environment) as entrant:
        with pytest.raises(EntrantEnded):
            entrant.get_ready()
        assert "unknown option --nonsense" in str(entrant.end())


@pytest.mark.slow
def test_a_race_that_is_killed_between_turns_leaves_nothing_stopped(tmp_path: Path) -> None:
    directory = tmp_path / "race"
    require_backend("horovod")
    command = [str(LOCKSTEP), "compare", "--backends", "ddp,horovod", "--task", "token-tagging"]
    command += [
        "--global-batch-size",
        "16",
        "--no-diagnosis",
        "--timed-steps",
        "100000",
        "--num-processes",
        "2",
    ]
    command += ["--no-limits", "--no-collectives", "--no-wait-for-idle", "--output-dir", str(directory)]
    race = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def turns_are_taken() -> bool:
        runs = [run for run in directory.glob("running/*") if (run / "logs" / "rank0.pid").exists()]
        return len(runs) == 2 and any(psutil.STATUS_STOPPED in _processes(run).values() for run in runs)

    wait_until(turns_are_taken, "two entrants, one of which rests", job=race)
    runs = list(directory.glob("running/*"))
    race.kill()
    race.wait()
    for run in runs:
        wait_until_gone(run)
        assert not _processes(run)


@pytest.mark.slow
def test_all_take_the_same_steps_in_each_round_in_changing_order(tmp_path: Path) -> None:
    options = ["--backends", "single,ddp", "--num-processes", "1", "--task", "token-tagging"]
    options += ["--global-batch-size", "16", "--diagnosis-steps", "10", "--timed-steps", "60", "--repeats", "3"]
    options += ["--no-collectives", "--no-wait-for-idle", "--output-dir", str(tmp_path / "race")]
    done = lockstep("compare", *options)
    assert done.returncode == 0, done.stderr
    runs = [read_run(path) for path in RaceDirectory(tmp_path / "race").records()]
    facts = [run.race for run in runs if run.race is not None and run.purpose == "timed"]
    assert len(facts) == 2 * 3
    orders = set()
    for block in (1, 2, 3):
        one, other = (each.turns for each in facts if each.block == block)
        assert [turn.round for turn in one] == list(range(len(one)))
        for mine, yours in zip(one, other, strict=True):
            assert (mine.first_step, mine.num_steps) == (yours.first_step, yours.num_steps)
            assert {mine.position, yours.position} == {0, 1}
        orders.add(tuple(turn.position for turn in one))
    assert len(orders) == 3
    assert is_decided(RaceDirectory(tmp_path / "race"), within=1e6)
    assert not is_decided(RaceDirectory(tmp_path / "race"), within=1e-6)
    # Of who has failed too often, no more will be known.
    given_up, *others = (tmp_path / "race" / "records").glob("timed-*-ddp-*a1-g16.json")
    for path in others:
        path.unlink()
    assert not is_decided(RaceDirectory(tmp_path / "race"), within=1e6)
    assert is_decided(RaceDirectory(tmp_path / "race"), within=1e6, without=[given_up])


def test_what_does_not_fit_into_memory_takes_turns_in_parts_that_share_an_entrant() -> None:
    """A rank needs half a GiB, and a starter some more."""
    entrants = _entrants("a", "b", "c", "d")
    assert _costs().parts(entrants) == [entrants]
    parts = _costs(available=2**32).parts(entrants)
    assert [[who.backend for who in part] for part in parts] == [["a", "b"], ["a", "c"], ["a", "d"]]
    on_gpu = _costs().model_copy(update={"gpu_rank_bytes": 30 * 2**30, "gpu_available_bytes": 80 * 2**30})
    assert on_gpu.parts(entrants) == parts
    shared = {"gpu_rank_bytes": 10 * 2**30, "gpu_available_bytes": 80 * 2**30}
    sharing = [_costs().model_copy(update={**shared, "num_gpus": number}) for number in (None, 2, 1)]
    assert [one.parts(entrants) for one in sharing] == [
        [entrants],
        [entrants],
        [entrants[:3], [entrants[0], entrants[3]]],
    ]
    plan = draw_plan(entrants, RaceOptions(), repeats=2, costs=_costs(available=2**32))
    heats = [heat for heat in heats_of(plan) if heat[0].purpose == "timed"]
    assert [len(heat) for heat in heats] == [2] * 6
    assert all("a" in {run.entrant.backend for run in heat} for heat in heats)
    assert len({run.name for run in plan}) == len(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_parts_of_a_block_repeat_its_turns_and_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.race.costs._SHARE_OF_MEMORY", 1e-9)
    options = ["--backends", "single,ddp", "--entrant", "again=ddp", "--num-processes", "1", "--task", "token-tagging"]
    options += ["--global-batch-size", "16", "--no-diagnosis", "--timed-steps", "30", "--repeats", "3"]
    options += ["--no-collectives", "--no-wait-for-idle", "--output-dir", str(tmp_path / "race")]
    assert run_compare(options) == 0
    runs = [read_run(path) for path in RaceDirectory(tmp_path / "race").records()]
    blocks: dict[int, list[RaceFacts]] = {}
    for run in runs:
        if run.race is not None and run.purpose == "timed":
            blocks.setdefault(run.race.block, []).append(run.race)
    for facts in blocks.values():
        assert sorted(one.heat for one in facts) == [0, 0, 1, 1]
        assert len({tuple((turn.first_step, turn.num_steps) for turn in one.turns) for one in facts}) == 1
    assert is_decided(RaceDirectory(tmp_path / "race"), within=1e6)


def test_times_of_a_later_part_are_corrected_by_the_shared_entrant() -> None:
    """The machine was twice as slow in the second part, where b took half as long again as a."""
    runs = [_timed("a", heat=0, seconds=1.0), _timed("a", heat=1, seconds=2.0), _timed("b", heat=1, seconds=3.0)]
    first, corrected = as_one_part(runs)
    assert first is runs[0]
    assert corrected.timed_steps[0].seconds == pytest.approx([1.5] * 5)


def test_a_turn_is_left_out_if_it_is_much_shorter_than_usual_not_if_another_is_much_longer() -> None:
    """What is left at the end of an epoch is a turn of a step or two, or belongs to the turn before."""
    turns = [(11, 5), (18, 2), (22, 5), (29, 13)]
    first, second = (EntrantRuns(name, name, name, "backend", [_timed(name, turns=turns)]) for name in "ab")
    assert len(paired(first, second).starts[0]) == 3


def test_the_seconds_of_a_step_are_the_median_of_the_runs() -> None:
    runs = [_timed("a", turns=[(11, 2), (14, 1)], seconds=seconds) for seconds in (1.0, 2.0, 9.0)]
    assert _timed_steps(runs) == {11: 2.0, 12: 2.0, 14: 2.0}


def test_what_a_step_costs_is_a_mean_over_all_turns() -> None:
    runs = [_timed("a", turns=[(11, 2), (14, 1)], cpu_seconds=3.0), _timed("a", turns=[(11, 2)], cpu_seconds=4.0)]
    assert _of_a_step(runs, "cpu_seconds") == pytest.approx((3.0 + 3.0 + 4.0) / 5)
    assert _of_a_step(runs, "instructions") is None
    assert _of_a_step([], "cpu_seconds") is None


def _timed(
    backend: str,
    *,
    heat: int = 0,
    seconds: float = 1.0,
    turns: Sequence[tuple[int, int]] = ((11, 5),),
    cpu_seconds: float = 0.0,
) -> Run:
    taken = [
        TurnFacts(
            round=number, position=0, first_step=first, num_steps=steps, step_seconds=[seconds] * steps,
            cpu_seconds=cpu_seconds, instructions=None, foreign_share=0.0,
        ) for number, (first, steps) in enumerate(turns, start=1)
    ]  # fmt: skip
    facts = RaceFacts(
        race="r", purpose="timed", entrant=backend, block=1, position=0, heat=heat, busy_share=0.0, gpu_processes=0,
        foreign_share=0.0, matmul_flops_per_second=None, turns=taken,
    )  # fmt: skip
    config = run_config("single", 1, Path("out"), micro_batch_size=32)
    content = {"status": "failed", "error": "made up", "config": config, "gradient_accumulation_steps": 1, "task": {}}
    content |= {"environment": describe_environment(with_torch=False), "quality": {}, "seconds_to_first_step": None}
    content |= {"seconds": 1.0, "steps": [], "evaluations": [], "ranks": []}
    return Run(backend, RunRecord.model_validate(content), facts)
