"""Which settings --tune finds for a backend: its positions really take turns, and the fastest one is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compare.race import tuning
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions
from compare.race.plan import PlannedRun, RacePlan
from compare.report.runs import Run
from tests.test_turns import _timed


def _costs(available: int = 2**40) -> Costs:
    return Costs(
        step_seconds={"fp32, 1, 32": 1.0},
        evaluation_seconds=1.0,
        import_seconds=1.0,
        steps_of_whole=100,
        gradient_bytes=2_500_000,
        bandwidth=None,
        num_cpus=2,
        rank_bytes=2**20,
        available_bytes=available,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_positions_take_turns_and_the_fastest_races_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, float]] = []

    def noting(*arguments: object) -> object:
        result = run_heat(*arguments)  # type: ignore[arg-type]
        directory, runs = arguments[2], arguments[1]
        tried.append({run.entrant.variant: directory.is_finished(run) for run in runs})  # type: ignore[attr-defined]
        return result

    run_heat = tuning.run_heat
    monkeypatch.setattr(tuning, "run_heat", noting)
    options = RaceOptions(backends=["ddp"], num_processes=[2], limits=False, tune=True, wait_for_idle=False)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    said: list[str] = []
    found = tuning.tuned_entrants(plan, _costs(), said.append)
    (positions,) = tried
    assert len(positions) > 2
    assert all(positions.values())  # none was refused or failed
    assert "" in positions  # as it comes
    assert said[0].startswith("tuning ddp: knob 1 of 1, ")
    assert said[-1].startswith("tuned ddp: ")
    if found:
        assert found[0].variant.removeprefix("tuned: ") in positions
        assert found[0].options
    else:
        assert said[-1] == "tuned ddp: nothing is faster than its defaults"


def test_what_is_faster_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RaceOptions(backends=["ddp"], num_processes=[2], limits=False, tune=True)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, *_: positions[-1])
    (entrant,) = tuning.tuned_entrants(plan, _costs(), lambda text: None)
    assert entrant.variant.startswith("tuned: --bucket-cap-mb")
    assert entrant.options == tuple(entrant.variant.removeprefix("tuned: ").split())


@pytest.fixture
def plan() -> RacePlan:
    options = RaceOptions(backends=["ddp"], num_processes=[2], limits=False, tune=True)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    return plan


def _made_up(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[tuple[int, str], float]) -> list[list[str]]:
    """Has positions take so many seconds for a step, by the part and what they are called, and all others fail.

    Returns:
        Who takes turns with whom.
    """
    heats: list[list[str]] = []
    runs: dict[Path, Run] = {}

    def run_heat(
        plan: RacePlan, heat: list[PlannedRun], directory: RaceDirectory, *_: Any
    ) -> dict[PlannedRun, str | None]:
        heats.append([run.entrant.variant for run in heat])
        reasons: dict[PlannedRun, str | None] = {}
        for run in heat:
            taken = seconds.get((run.heat, run.entrant.variant))
            reasons[run] = "no luck" if taken is None else None
            if taken is not None:
                directory.record(run).touch()
                runs[directory.record(run)] = _timed(run.entrant.name, heat=run.heat, seconds=taken)
        return reasons

    monkeypatch.setattr(tuning, "run_heat", run_heat)
    monkeypatch.setattr(tuning, "read_run", lambda path: runs[path])
    return heats


def test_positions_that_do_not_fit_into_memory_take_turns_in_parts(
    plan: RacePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is half as fast in the second part, and slower still in the third."""
    first, second, third = (f"--bucket-cap-mb={mebibytes}" for mebibytes in (1, 5, 100))
    times = {(0, ""): 1.0, (0, first): 0.9, (1, ""): 2.0, (1, second): 1.5, (2, ""): 3.0, (2, third): 3.3}
    heats = _made_up(monkeypatch, times)
    (entrant,) = tuning.tuned_entrants(plan, _costs(available=2**30), lambda text: None)
    assert heats == [["", first], ["", second], ["", third]]
    assert entrant.options == (second,)
    assert tuning.seconds_of_tuning(plan.entrants, _costs(available=2**30)) > tuning.seconds_of_tuning(
        plan.entrants, _costs()
    )


@pytest.mark.parametrize(
    ("times", "failed", "found"),
    [
        ({}, ["its defaults", "=1", "=5", "=100"], "all that was tried failed"),
        ({(0, ""): 1.0}, ["=1", "=5", "=100"], "nothing is faster than its defaults"),
        ({(0, "--bucket-cap-mb=5"): 1.0}, ["its defaults", "=1", "=100"], "--bucket-cap-mb=5"),
    ],
)
def test_what_failed_is_said(
    plan: RacePlan, monkeypatch: pytest.MonkeyPatch, times: dict[tuple[int, str], float], failed: list[str], found: str
) -> None:
    _made_up(monkeypatch, times)
    said: list[str] = []
    tuning.tuned_entrants(plan, _costs(), said.append)
    names = [one.replace("=", "--bucket-cap-mb=") for one in failed]
    assert said[1:] == [*(f"tuning ddp: {name} failed: no luck" for name in names), f"tuned ddp: {found}"]
