"""Which settings --tune finds for a backend: its positions really take turns, and the fastest one is kept."""

from __future__ import annotations

import pytest

from compare.race import tuning
from compare.race.costs import Costs
from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions


def _costs() -> Costs:
    return Costs(
        step_seconds={"fp32, 1, 32": 1.0},
        evaluation_seconds=1.0,
        import_seconds=1.0,
        steps_of_whole=100,
        gradient_bytes=2_500_000,
        bandwidth=None,
        num_cpus=2,
        rank_bytes=2**20,
        available_bytes=2**30,
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
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, steps: positions[-1])
    (entrant,) = tuning.tuned_entrants(plan, _costs(), lambda text: None)
    assert entrant.variant.startswith("tuned: --bucket-cap-mb")
    assert entrant.options == tuple(entrant.variant.removeprefix("tuned: ").split())
