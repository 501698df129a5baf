"""The suite itself under test: every fault that is put in on purpose is caught by the check named for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from backends.interface import UnsupportedError
from backends.registry import find_backend
from contract.alone import train_alone
from contract.check import Evidence, State, Violation, all_checks
from contract.groups import Breakdown, GroupKey, Outcome, run_group
from contract.suite import Suite
from tests.launching import DISTRIBUTED, require_backend
from tests.mutants import ADAPTERS, MUTANTS, Mutant

BY_HAND = "tests.by_hand:ByHandBackend"
TWO_RANKS = 2

Outcomes = dict[str, Outcome]


def _short(adapter: str) -> str:
    return "by_hand" if adapter == BY_HAND else adapter


def _supports(adapter: str, mutant: Mutant) -> bool:
    case = mutant.case
    try:
        find_backend(adapter).capabilities.check(
            name=adapter,
            device="cpu",
            precision=case.precision,
            world_size=TWO_RANKS,
            find_unused_parameters=case.find_unused_parameters,
        )
    except UnsupportedError:
        return False
    return True


PAIRS = [
    pytest.param(adapter, name, id=f"{_short(adapter)}-{name}")
    for adapter in (*DISTRIBUTED, BY_HAND)
    for name, mutant in sorted(MUTANTS.items(), key=lambda item: (item[1].case.precision, item[0]))
    if _short(adapter) not in mutant.harmless_on and _supports(adapter, mutant)
]


def _key(mutant: Mutant) -> GroupKey:
    return GroupKey(TWO_RANKS, mutant.case.precision, mutant.case.find_unused_parameters)


@pytest.fixture(scope="module")
def groups() -> dict[tuple[str, GroupKey], Outcomes]:
    """What each adapter did under all mutants that fit one group of ranks."""
    return {}


def _outcome(
    groups: dict[tuple[str, GroupKey], Outcomes], factory: pytest.TempPathFactory, adapter: str, mutant: Mutant
) -> Outcome:
    key = _key(mutant)
    if (adapter, key) not in groups:
        mine = [other for other in MUTANTS.values() if _key(other) == key and _short(adapter) not in other.harmless_on]
        directory = factory.mktemp("mutants")
        files = {}
        for case in {other.case.name: other.case for other in mine}.values():
            if any(training.resume == "single" for training in case.trainings):
                files[case.name] = directory / f"{case.name}.pt"
                torch.save(train_alone(case, TWO_RANKS, device="cpu")["state"], files[case.name])
        groups[adapter, key] = run_group(
            adapter,
            find_backend(adapter),
            key,
            [dataclasses.replace(other.case, name=other.mutated_case_name) for other in mine],
            directory / "group",
            device="cpu",
            single_states=files,
            module="tests.mutant_rank",
        )
    return groups[adapter, key][mutant.mutated_case_name]


@pytest.mark.parametrize(("adapter", "name"), PAIRS)
def test_a_mutant_is_caught_by_its_check(
    groups: dict[tuple[str, GroupKey], Outcomes], tmp_path_factory: pytest.TempPathFactory, adapter: str, name: str
) -> None:
    require_backend(adapter)
    mutant = MUTANTS[name]
    outcome = _outcome(groups, tmp_path_factory, adapter, mutant)
    expected = mutant.stops.get(_short(adapter), mutant.stops.get("*"))
    if isinstance(outcome, Breakdown):
        # The fault stopped the training, in the way it was expected to: the check has no evidence and fails.
        assert expected is not None, outcome.message
        assert expected in outcome.message
        return
    assert expected is None, "it was expected to stop the training"
    memory = {}
    if any(training.resume == "single" for training in mutant.case.trainings):
        memory["single"] = train_alone(mutant.case, TWO_RANKS, device="cpu")
    evidence = Evidence(adapter, mutant.case, TWO_RANKS, "cpu", outcome, memory)
    with pytest.raises(Violation):
        all_checks()[mutant.check_id].verify(evidence)


@pytest.mark.parametrize(("name", "check_id"), ADAPTERS.items())
def test_a_broken_adapter_is_caught_by_its_check(tmp_path: Path, name: str, check_id: str) -> None:
    adapter = f"tests.mutants:{name}"
    suite = Suite(adapter, tmp_path, world_sizes=[2, 1], precisions=["fp32"], check_ids=[check_id])
    assert any(result.state is State.FAILED for result in suite.results())


def test_every_check_has_a_mutant() -> None:
    """Deleting a check leaves a mutant uncaught, or the check's docstring says why none is possible."""
    named = {mutant.check_id for mutant in MUTANTS.values()} | set(ADAPTERS.values())
    without = [check for check in all_checks().values() if check.id not in named]
    assert all("No mutant:" in check.explanation for check in without), [check.id for check in without]
    assert named <= set(all_checks())


def test_there_are_mutants_of_every_adapter() -> None:
    counts = {adapter: sum(param.values[0] == adapter for param in PAIRS) for adapter in (*DISTRIBUTED, BY_HAND)}
    assert all(count >= 15 for count in counts.values()), counts
