"""The suite of the contract: groups that break, failures that are expected, and how results are summed up."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pytest
from pydantic import Field

from backends.capabilities import BackendSettings
from backends.interface import BackendOptions, KnownFailure
from contract.cases import ALL
from contract.check import Evidence, State, Violation, all_checks
from contract.groups import Breakdown, Group, GroupKey, Outcome, run_group
from contract.options import ContractOptions, OwnOptions
from contract.patience import stretched
from contract.suite import Instance, Result, Suite
from contract.verdicts import Verdict, summarise
from launch.job import compose_job
from launch.starters.python import Python
from tests.by_hand import ByHandBackend

BY_HAND = "tests.by_hand:ByHandBackend"

# Groups that break.


def _broken(directory: Path) -> tuple[dict[str, Outcome], int]:
    """Returns the outcomes of ten cases in ranks that break in each of them, and the number of starts."""
    cases = [case for case in ALL if case.precision == "fp32" and not case.is_job][:10]
    group = Group(
        BY_HAND,
        GroupKey(1, "fp32", find_unused_parameters=False),
        directory,
        module="tests.breaking_rank",
        compose=lambda starter, *rest: compose_job(Python(), *rest),
    )
    outcomes = run_group(group, cases)
    assert list(outcomes) == [case.name for case in cases]
    return outcomes, len(list(directory.glob("start-*")))


def test_each_case_that_breaks_has_a_start_and_a_message_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SOUND_STARTS", "100")
    outcomes, num_starts = _broken(tmp_path)
    assert num_starts == len(outcomes)
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Breakdown)
        assert outcome.message == f"ArithmeticError: {name} does not go"


def test_a_case_that_never_ran_is_not_blamed_with_the_failure_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_SOUND_STARTS", "7")
    outcomes, num_starts = _broken(tmp_path)
    assert num_starts == 8
    messages = [outcome.message for outcome in outcomes.values() if isinstance(outcome, Breakdown)]
    assert messages[:7] == [f"ArithmeticError: {name} does not go" for name in list(outcomes)[:7]]
    not_run = "the group was started 8 times, and the last start ended in 'construct' with: rank 0: "
    assert messages[7:] == [f"{not_run}ArithmeticError: there is no group"] * 3
    assert [outcome.has_run for outcome in outcomes.values() if isinstance(outcome, Breakdown)] == [True] * 7 + [
        False
    ] * 3


@pytest.mark.parametrize(
    ("load", "num_ranks", "seconds"),
    [(0.5, 1, 10.0), (4.0, 1, 20.0), (0.5, 3, 15.0), (4.0, 3, 20.0), (90.0, 3, 100.0)],
)
def test_limits_grow_with_the_load_and_with_ranks_that_share_a_core(
    monkeypatch: pytest.MonkeyPatch, load: float, num_ranks: int, seconds: float
) -> None:
    """The cores are those that the contract may use, of however many the machine has."""
    monkeypatch.setattr("contract.patience.num_cpus", lambda: 2)
    monkeypatch.setattr("contract.patience.os.getloadavg", lambda: (load, 0.0, 0.0))
    assert stretched(10.0, num_ranks) == seconds


@pytest.mark.parametrize(("seconds", "holds"), [(21.0, True), (49.0, True), (51.0, False)])
def test_a_busy_machine_is_not_held_against_an_adapter(seconds: float, holds: bool) -> None:
    """If a job took 30 s to reach the fault, it may take longer to end after it than on an idle machine."""
    check = all_checks()["C43"]
    (case,) = (case for case in check.cases if case.name == "rank-exits")
    seen = {
        **{"faulty_rank": 1, "return_code": 1, "message": "rank 1: SystemExit: 3", "left": [], "status": "failed"},
        **{"timeout": 10, "seconds_to_fault": 30.0, "seconds": seconds},
    }
    with nullcontext() if holds else pytest.raises(Violation, match="an end within 50 s of the fault, saw 51 s"):
        check.verify(Evidence(BY_HAND, case, 2, "cpu", [seen]))


# Expected failures.


class KnownToFailBackend(ByHandBackend):
    """Declares a failure that it shows, and one that it does not."""

    known_failures: ClassVar = {
        "C06": KnownFailure("tells no transport", "https://example.org/1"),
        "C10": KnownFailure("wraps the model", "https://example.org/2"),
    }

    def effective_settings(self) -> dict[str, Any]:
        return {}


def test_expected_failures_are_shown_and_strict(tmp_path: Path) -> None:
    suite = Suite(f"{__name__}:KnownToFailBackend", tmp_path, ContractOptions(num_processes=[1], check=["C06", "C10"]))
    verdicts = summarise(list(suite.results()), suite.known_failures)
    assert [verdict.state for verdict in verdicts] == [State.EXPECTED_FAILURE, State.FAILED]
    assert "tells no transport" in verdicts[0].reason
    assert "https://example.org/1" in verdicts[0].reason
    assert "it passes: remove it" in verdicts[1].reason


class LevelSettings(BackendSettings):
    level: Literal["low", "high"] = Field("low", description="how carefully")


class LevelBackend(ByHandBackend):
    """Needs an option of its own before it refuses anything."""

    Settings = LevelSettings

    def __init__(self, options: BackendOptions) -> None:
        if cast(LevelSettings, options.settings).level != "high":
            raise ValueError("--level low: too low")
        super().__init__(options)


class SilentBackend(ByHandBackend):
    """Ends its process instead of refusing anything."""

    def __init__(self, options: BackendOptions) -> None:
        os._exit(0)


@pytest.mark.parametrize(
    ("adapter", "check", "reason"),
    [
        (f"{__name__}:LevelBackend", "C04", None),
        (f"{__name__}:SilentBackend", "C37", "saw no answer"),
        ("tests.mutants.adapters:CarelessBackend", "C37", "saw another request that was not refused"),
    ],
)
def test_adapters_are_asked_for_what_they_do_not_declare(
    tmp_path: Path, adapter: str, check: str, reason: str | None
) -> None:
    options = ContractOptions(num_processes=[1], check=[check])
    own = OwnOptions(("--level", "high"), LevelSettings(level="high")) if "Level" in adapter else None
    (verdict,) = summarise(list(Suite(adapter, tmp_path, options, own=own).results()), {})
    assert verdict.state is (State.PASSED if reason is None else State.FAILED)
    assert (reason or "") in verdict.reason


def test_states_are_summed_up_by_the_worst() -> None:
    check = all_checks()["C28"]

    def verdict(*states: State) -> Verdict:
        results = [
            Result(Instance(check, case, 2), state, "why") for case, state in zip(check.cases, states, strict=False)
        ]
        return summarise(results, {})[0]

    assert verdict(State.PASSED, State.UNSUPPORTED).state is State.PASSED
    assert verdict(State.PASSED, State.FAILED, State.EXPECTED_FAILURE).state is State.FAILED
    assert verdict(State.UNSUPPORTED, State.UNSUPPORTED).state is State.UNSUPPORTED


def test_what_could_not_run_may_be_what_is_declared_to_fail() -> None:
    check = all_checks()["C28"]
    known = {"C28": KnownFailure("C28", "a reason")}
    for state, expected in ((State.PASSED, State.FAILED), (State.UNAVAILABLE, State.PASSED)):
        results = [
            Result(Instance(check, case, 2), one, "why")
            for case, one in zip(check.cases, (State.PASSED, state), strict=False)
        ]
        assert summarise(results, known)[0].state is expected


def test_ranks_that_would_want_more_gpus_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("options", "suite"):
        monkeypatch.setattr(f"contract.{module}.count_gpus", lambda: 1)
    options = ContractOptions(device="cuda", num_processes=[2], precision=["fp32"], check=["C16"])
    suite = Suite("ddp", tmp_path, options)
    capabilities = replace(suite.row.capabilities, ranks_may_share_gpu=False)
    suite.row = replace(suite.row, declare=lambda: capabilities)
    result = suite.judge(suite.instances[0])
    assert result.state is State.UNAVAILABLE
    assert result.reason == "ddp needs one GPU for each of 2 ranks, but 1 are visible"
