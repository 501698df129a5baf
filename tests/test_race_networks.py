"""The command lines of runs whose ranks are on other machines: those to read, and those that are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.race.directory import RaceDirectory
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, PlannedRun, RacePlan
from compare.race.report import info_of
from tests.made_races import plan_of


def _plan(options: RaceOptions) -> RacePlan:
    entrants = [
        Entrant(backend=name, num_processes=number, precision="fp32", accumulation=1, global_batch_size=32)
        for name, number in (("single", 1), ("ddp", 4))
    ]
    return plan_of(options, entrants)


@pytest.fixture
def plan() -> RacePlan:
    return _plan(RaceOptions(engine="mpi", hosts="a.invalid,b.invalid", num_processes=[1, 4]))


def test_a_report_asks_no_network_for_the_commands_of_a_race(plan: RacePlan, tmp_path: Path) -> None:
    """It may be made on another machine, which knows none of the hosts."""
    commands = info_of(RaceDirectory(tmp_path), plan).commands
    lines = [line for what, line in commands.items() if "run of" in what]
    assert any("--engine=mpi --hosts=a.invalid,b.invalid" in line for line in lines)
    assert not any("port" in line for line in lines)


def test_each_run_that_is_started_between_machines_meets_at_a_port_of_its_own(
    plan: RacePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare.networks.address_of_first", lambda hosts: "127.0.0.1")
    alone, together = (PlannedRun(entrant=who, purpose="timed", block=1, position=0) for who in plan.entrants)
    command = plan.starting(together, Path("out"))
    (port,) = [word for word in command if word.startswith("--master-port=")]
    assert int(port.partition("=")[2]) > 0
    assert command[: len(plan.arguments(together))] == plan.arguments(together)
    assert command[-1] == "--output-dir=out"
    assert plan.starting(alone, Path("out")) == [*plan.arguments(alone), "--output-dir=out"]


def test_hosts_that_this_machine_makes_need_no_port() -> None:
    """Each run has a network of its own."""
    plan = _plan(RaceOptions(engine="netns", num_processes=[1, 4]))
    run = PlannedRun(entrant=plan.entrants[-1], purpose="timed", block=1, position=0)
    assert plan.starting(run, Path("out")) == [*plan.arguments(run), "--output-dir=out"]
    assert {"--engine=netns", "--num-nodes=4"} <= set(plan.arguments(run))
