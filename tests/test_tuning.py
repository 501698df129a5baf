"""Which settings --tune finds for a backend: its positions really take turns, and the fastest one is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.registry import find_backend
from compare.race import tuning
from compare.race.costs import Costs
from compare.race.directory import RaceDirectory
from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions
from compare.race.plan import PlannedRun, RacePlan
from compare.report.reading import read_run
from compare.report.runs import Run
from tests.launching import require_backend, require_start_method
from tests.test_turns import _timed

# A position that is another way of starting, with variables.
_OPEN_MPI = "--start-method=mpirun HOROVOD_CYCLE_TIME=0.1 OMPI_MCA_mpi_yield_when_idle=1"


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


def _plan(backend: str, accumulation: Sequence[int] = (1,)) -> RacePlan:
    options = RaceOptions(
        backends=[backend],
        num_processes=[2],
        accumulation=[*accumulation],
        limits=False,
        tune=True,
        wait_for_idle=False,
    )
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    return plan


def _has_knob(monkeypatch: pytest.MonkeyPatch, backend: str, *positions: str) -> None:
    row = replace(find_backend(backend), knobs=(positions,))
    monkeypatch.setattr(tuning, "find_backend", lambda name: row)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Run | None]]:
    """What each heat of the test leaves: the run of each position, or None if it was refused or failed."""
    heats: list[dict[str, Run | None]] = []
    run_heat = tuning.run_heat

    def noting(
        plan: RacePlan, runs: list[PlannedRun], directory: RaceDirectory, *others: Any
    ) -> dict[PlannedRun, str | None]:
        result = run_heat(plan, runs, directory, *others)
        heats.append(
            {
                run.entrant.variant: read_run(directory.record(run)) if directory.is_finished(run) else None
                for run in runs
            }
        )
        return result

    monkeypatch.setattr(tuning, "run_heat", noting)
    return heats


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_positions_take_turns_and_the_fastest_races_under_its_own_name(tried: list[dict[str, Run | None]]) -> None:
    said: list[str] = []
    found = tuning.tuned_entrants(_plan("ddp"), _costs(), said.append)
    transports, buckets = tried
    assert list(transports) == ["", "--transport=shared-memory", "--embedding-gradients=rows"]  # first as it comes
    assert len(buckets) > 2
    assert all([*transports.values(), *buckets.values()])
    shared = transports["--transport=shared-memory"]
    assert shared is not None
    assert shared.record.ranks[0].effective_settings["transport"] == "shared memory"
    assert said[0] == "tuning ddp: knob 1 of 2, 3 positions"
    assert said[-1].startswith("tuned ddp: ")
    if found:
        assert found[0].name == "ddp (tuned)"
        assert " ".join(found[0].options) in buckets
        assert said[-1] == f"tuned ddp: {' '.join(found[0].options)}"
    else:
        assert said[-1] == "tuned ddp: nothing is faster than its defaults"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_positions_of_fabric_are_those_of_the_backend(tried: list[dict[str, Run | None]]) -> None:
    """And not of the peer of its name, which has no options."""
    require_backend("fabric")
    tuning.tuned_entrants(_plan("fabric"), _costs(), lambda text: None)
    rows, buckets = tried
    assert list(rows) == ["", "--embedding-gradients=rows"]
    assert len(buckets) > 2
    assert all([*rows.values(), *buckets.values()]), "one was refused or failed"


@pytest.mark.slow
def test_a_position_may_be_another_way_of_starting_with_variables(
    tried: list[dict[str, Run | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_backend("horovod")
    require_start_method("mpirun")
    _has_knob(monkeypatch, "horovod", _OPEN_MPI)
    tuning.tuned_entrants(_plan("horovod"), _costs(), lambda text: None)
    (positions,) = tried
    assert list(positions) == ["", _OPEN_MPI]
    by_default, yielding = (run.record for run in positions.values() if run is not None)
    assert [one.ranks[0].effective_settings["transport"] for one in (by_default, yielding)] == ["gloo", "mpi"]
    assert yielding.ranks[0].effective_settings["cycle_time_ms"] == 0.1
    assert yielding.environment.variables["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_what_is_faster_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is short; the terminal and the report say once what it stands for."""
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, *_: positions[-1])
    said: list[str] = []
    (entrant,) = tuning.tuned_entrants(_plan("ddp"), _costs(), said.append)
    assert entrant.name == "ddp (tuned)"
    assert [option.split("=")[0] for option in entrant.options] == ["--embedding-gradients", "--bucket-cap-mb"]
    assert said[-1] == f"tuned ddp: {' '.join(entrant.own_settings)}"


def test_under_all_conditions_a_backend_has_what_was_found_under_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, *_: positions[-1])
    found = tuning.tuned_entrants(_plan("ddp", accumulation=(1, 2)), _costs(), lambda text: None)
    assert [one.label for one in found] == [f"ddp (tuned), 2 rank(s), fp32, {batch}" for batch in ("16 x 1", "8 x 2")]
    assert found[0].options == found[1].options


def test_what_cannot_run_on_gpus_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, *_: positions[-1])
    for module in ("launch.options", "launch.resolve"):
        monkeypatch.setattr(f"{module}.count_gpus", lambda: 2)
    plan = _plan("ddp")
    plan.run_options.append("--device=cuda")
    said: list[str] = []
    (entrant,) = tuning.tuned_entrants(plan, _costs(), said.append)
    assert said[0] == (
        "tuning ddp: --transport=shared-memory is left out: --transport shared-memory is for ranks that compute on the "
        "CPUs of one node, not on GPUs; leave it out"
    )
    assert [option.split("=")[0] for option in entrant.options] == ["--bucket-cap-mb"]


def test_what_needs_open_mpi_is_left_out_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_backend("horovod")
    require_start_method("mpirun")
    plan = _plan("horovod")
    with_it = tuning.seconds_of_tuning(plan, _costs())
    monkeypatch.setattr(tuning, "_fastest", lambda plan, positions, *_: positions[-1])
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    (entrant,) = tuning.tuned_entrants(plan, _costs(), said.append)
    assert said[:2] == [
        f"tuning horovod: {_OPEN_MPI} is left out: mpirun is not installed; install Open MPI (Debian: openmpi-bin), "
        "or use horovodrun",
        "tuning horovod: knob 1 of 3, 4 positions",
    ]
    assert "--start-method=mpirun" not in entrant.options
    assert tuning.seconds_of_tuning(plan, _costs()) < with_it


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> RacePlan:
    """Of DDP, whose only knob is the size of its buckets."""
    _has_knob(monkeypatch, "ddp", *find_backend("ddp").knobs[-1])
    return _plan("ddp")


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
    assert tuning.seconds_of_tuning(plan, _costs(available=2**30)) > tuning.seconds_of_tuning(plan, _costs())


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
