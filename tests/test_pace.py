"""How far a race gets within its budget, on a clock that the test sets."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compare.race import pace as module
from compare.race import progress as progress_module
from compare.race import run as race_module
from compare.race.collectives import seconds_of_collectives
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.options import RaceOptions
from compare.race.pace import Pace
from compare.race.plan import Entrant, PlannedRun, RacePlan, Schedule, heats_of
from launch.quantities import format_duration

COSTS = Costs(
    step_seconds={"fp32, 1, 32": 0.01, "bf16, 1, 32": 0.01},
    evaluation_seconds=1.0,
    import_seconds=1.0,
    steps_of_whole=100,
    gradient_bytes=0,
    bandwidth=None,
    num_cpus=2,
    rank_bytes=1,
    available_bytes=2**40,
)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for one in (module, progress_module):
        monkeypatch.setattr(one, "time", clock)
    return clock


def _plan(
    *,
    repeats: int,
    most_repeats: int,
    precisions: tuple[str, ...] = ("fp32",),
    backends: tuple[str, ...] = ("one", "other"),
) -> RacePlan:
    entrants = [
        Entrant(backend=name, num_processes=2, precision=precision, accumulation=1, global_batch_size=32)
        for name in backends
        for precision in precisions
    ]
    return RacePlan(
        schema_version=8,
        options=RaceOptions(diagnosis=False),
        schedule=Schedule(repeats=repeats, most_repeats=most_repeats, timed_steps=100, seconds=0.0),
        costs=COSTS,
        entrants=entrants,
        run_options=[],
        diagnosis_options=[],
        left_out=[],
        command="",
        race="",
    )


class Directory:
    """What a race leaves, as far as it is asked for."""

    def __init__(self) -> None:
        self.finished: set[PlannedRun] = set()

    def matmul_peaks(self, plan: RacePlan) -> dict[str, float]:
        return {}

    def is_over(self, heat: list[PlannedRun]) -> bool:
        return self.finished.issuperset(heat)

    def is_finished(self, run: PlannedRun) -> bool:
        return run in self.finished

    has_ended = is_finished

    def nothing(self, *_: object) -> None:
        pass

    await_orphans = forget = clear = nothing


def _race(plan: RacePlan, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, seconds: float, speed: float) -> int:
    """Returns how many blocks a race has, all of them whole, whose runs take `speed` times what is expected."""
    blocks: Counter[int] = Counter()

    def run_heat(plan: RacePlan, heat: list[PlannedRun], directory: Directory, *_: object) -> dict[PlannedRun, None]:
        assert plan.costs is not None
        clock.now += speed * plan.costs.heat(heat, plan.options, plan.schedule.timed_steps)
        blocks[heat[0].block] += 1
        directory.finished.update(heat)
        return dict.fromkeys(heat)

    monkeypatch.setattr(race_module, "run_heat", run_heat)
    directory: Any = Directory()
    race_module.run_race(plan, directory, Console(file=io.StringIO()), seconds=seconds)
    assert len(set(blocks.values())) == 1
    return len(blocks)


@pytest.mark.parametrize(("speed", "blocks"), [(1.0, 5), (0.5, 9), (0.25, 12), (1.4, 3), (9.0, 3)])
def test_a_race_goes_on_while_there_is_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, speed: float, blocks: int
) -> None:
    """Faster than expected, it has more starts, up to a limit; slower, it has fewer, but three at least."""
    plan = _plan(repeats=5, most_repeats=12)
    seconds = 5 * COSTS.heat(plan.runs()[:2], plan.options, 100)
    assert _race(plan, clock, monkeypatch, seconds=seconds * 1.001, speed=speed) == blocks


@pytest.mark.parametrize(("speed", "blocks"), [(1.0, 4), (0.9, 4), (0.8, 4), (0.7, 5), (0.25, 9), (3.0, 3)])
def test_blocks_under_several_conditions_are_whole(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, speed: float, blocks: int
) -> None:
    plan = _plan(repeats=4, most_repeats=9, precisions=("fp32", "bf16"))
    seconds = 8 * COSTS.heat(plan.runs()[:2], plan.options, 100)
    assert _race(plan, clock, monkeypatch, seconds=seconds * 1.001, speed=speed) == blocks


def test_what_the_user_has_settled_is_not_cut_short(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(repeats=7, most_repeats=7)
    assert _race(plan, clock, monkeypatch, seconds=math.inf, speed=100.0) == 7


def test_a_block_that_has_begun_is_completed(clock: Clock) -> None:
    plan = _plan(repeats=4, most_repeats=4, precisions=("fp32", "bf16"))
    heats = heats_of(plan.runs())
    assert len(heats) == 8
    pace = Pace(plan, plan.runs(), 1000.0)
    for heat in heats[:7]:
        pace.note(heat, 1.0)
    clock.now = 1e6
    assert pace.to_come() == heats[7:]


def test_a_race_that_was_complete_has_nothing_left(clock: Clock) -> None:
    """What there was no time for does not take place when the same command is repeated."""
    plan = _plan(repeats=4, most_repeats=10)
    left = [run for run in plan.runs() if run.block > 4]
    assert Pace(plan, left, 1000.0).to_come() == []


def test_an_interrupted_race_has_its_share_of_the_time(clock: Clock) -> None:
    plan = _plan(repeats=8, most_repeats=20)
    left = [run for run in plan.runs() if run.block > 4]
    seconds = 8 * COSTS.heat(plan.runs()[:2], plan.options, 100)
    blocks = {heat[0].block for heat in Pace(plan, left, seconds * 1.001).to_come()}
    assert blocks == {5, 6, 7, 8}


@pytest.mark.parametrize(("num_processes", "longer"), [(2, False), (4, True)])
def test_ranks_that_poll_on_too_few_cores_are_expected_to_be_slow(num_processes: int, longer: bool) -> None:
    spinning = Entrant(
        backend="horovod", num_processes=num_processes, precision="fp32", accumulation=1, global_batch_size=32
    )
    asleep = spinning.model_copy(update={"variant": "asleep", "options": ("--wait=sleep",)})
    assert (COSTS.step(spinning) > 2 * COSTS.step(asleep)) is longer


def test_starts_on_nodes_are_expected_to_take_longer() -> None:
    """Each node has a command line and a starter of its own."""
    ranks = Entrant(backend="ddp", num_processes=4, precision="fp32", accumulation=1, global_batch_size=32)
    on_nodes = COSTS.model_copy(update={"has_nodes": True})
    assert on_nodes.start([ranks]) > COSTS.start([ranks])
    one = ranks.model_copy(update={"num_processes": 1})
    assert on_nodes.start([one]) == COSTS.start([one])


@pytest.mark.parametrize("measured", [[], ["ddp"], ["ddp", "horovod"]])
def test_what_is_left_includes_the_collectives_that_are_not_measured_yet(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: list[str]
) -> None:
    """They come after the last run, unless an earlier call has measured them."""
    plan = _plan(repeats=3, most_repeats=3, backends=("ddp", "horovod"))
    *earlier, _ = heats_of(plan.runs())
    directory: Any = Directory()
    directory.finished.update(run for heat in earlier for run in heat)
    directory.collectives = RaceDirectory(tmp_path).collectives
    for name in measured:
        directory.collectives(name).touch()
    monkeypatch.setattr(race_module, "run_heat", lambda plan, heat, *_: dict.fromkeys(heat))
    terminal = io.StringIO()
    race_module.run_race(plan, directory, Console(file=terminal), seconds=math.inf)
    seconds = seconds_of_collectives([one for one in plan.entrants if one.backend not in measured], plan.options)
    assert terminal.getvalue().splitlines()[-1] == f"[6/6] about {format_duration(seconds)} left"
    assert (seconds > 0) is (len(measured) < 2)
