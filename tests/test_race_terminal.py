"""What a race shows in a narrow terminal before it begins and while it runs."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from compare.race.command import _show_plan
from compare.race.costs import Costs
from compare.race.options import RaceOptions
from compare.race.pace import Pace
from compare.race.plan import Entrant, RacePlan, Schedule, heats_of
from compare.race.progress import ProgressOfRace

WIDTH = 60
VARIANTS = {"accelerate": "", "horovod": "waits asleep, cycle of 0.1 ms"}


@pytest.fixture
def plan() -> RacePlan:
    costs = Costs(
        step_seconds={"fp32, 1, 2048": 0.01, "fp32, 4, 2048": 0.01},
        evaluation_seconds=1.0,
        import_seconds=1.0,
        steps_of_whole=100,
        gradient_bytes=0,
        bandwidth=None,
        num_cpus=2,
        rank_bytes=1,
        available_bytes=2**40,
    )
    entrants = [
        Entrant(
            backend=name,
            num_processes=16,
            precision="fp32",
            accumulation=4,
            global_batch_size=2048,
            variant=variant,
        )
        for name, variant in VARIANTS.items()
    ]
    return RacePlan(
        schema_version=8,
        options=RaceOptions(),
        schedule=Schedule(repeats=40, most_repeats=60, timed_steps=100, seconds=5400.0),
        costs=costs,
        entrants=entrants,
        run_options=[],
        diagnosis_options=[],
        left_out=["apex: is left out, since it is not installed here; docs/backends.md says how to install it"],
        command="",
        race="",
    )


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system=None)


def _lines(terminal: Console) -> list[str]:
    """All lines that were shown, without what moves the cursor."""
    assert isinstance(terminal.file, io.StringIO)
    return [line for line in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", terminal.file.getvalue()) if line.strip()]


def test_the_plan_has_a_line_for_each_entrant(plan: RacePlan, terminal: Console) -> None:
    _show_plan(plan, terminal)
    lines = _lines(terminal)
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert sorted(line.split()[0] for line in lines if "diagnosis, 40" in line) == ["accelerate", "horovod"]
    assert text.endswith("for 100 steps: about 90min, estimated from a few steps taken now")


def test_the_plan_says_what_a_search_for_settings_may_add(plan: RacePlan, terminal: Console) -> None:
    """Horovod takes part with settings of its own, and is not tuned."""
    plan.options.tune = True
    _show_plan(plan, terminal)
    assert "--tune adds up to 1 entrant(s), which the estimate includes" in " ".join(" ".join(_lines(terminal)).split())


def test_the_progress_fits_into_the_terminal(plan: RacePlan, terminal: Console) -> None:
    """What does not fit into the line that says what the race does is cut; why a run failed is not."""
    reason = "rank 3: out of memory in step 17; choose a smaller --micro-batch-size, or fewer ranks"
    with ProgressOfRace(Pace(plan, plan.runs(), 5400.0), 0, terminal, seconds_afterwards=28.0) as progress:
        heat = heats_of(plan.runs())[0]
        progress.begin(heat)
        progress.say("other programs take 43 % of the cores; waiting until they take less, for two minutes at most")
        progress.begin_round(heat, 12000, 18000)
        progress.end(heat, {heat[0]: reason})
    lines = _lines(terminal)
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("other programs take 43 %") and line.endswith("…") for line in lines)
    assert any(line.rstrip().endswith("min left") for line in lines)
    assert f"FAILED: {reason}" in " ".join(" ".join(lines).split())


def test_what_comes_after_the_runs_is_left_when_these_are_over(plan: RacePlan, terminal: Console) -> None:
    with ProgressOfRace(Pace(plan, [], 5400.0), 0, terminal, seconds_afterwards=28.0) as progress:
        progress.say("waiting")
    assert any(line.rstrip().endswith("about 28s left") for line in _lines(terminal))
