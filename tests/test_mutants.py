"""The suite itself under test: the check that a mutant names catches it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backends.capabilities import UnsupportedError
from backends.registry import find_backend
from contract.alone import train_alone
from contract.check import Evidence, State, Violation, all_checks
from contract.groups import Breakdown, Group, GroupKey, Outcome, run_group
from contract.options import ContractOptions
from contract.suite import Result, Suite
from tests.forked.client import forked_job
from tests.launching import DISTRIBUTED, IN_FLOAT32, require_backend
from tests.mutants import MUTANTS, REPLICATED, Mutant
from tests.mutants.adapters import ADAPTERS
from tests.sparing import in_ci

pytestmark = pytest.mark.slow

BY_HAND = "tests.by_hand:ByHandBackend"

Outcomes = dict[str, Outcome]
OutcomesOf = Callable[[str, GroupKey], Outcomes]


def _short(adapter: str) -> str:
    return "by_hand" if adapter == BY_HAND else adapter


def _float64(adapter: str) -> bool:
    return find_backend(adapter).capabilities.float64


def _supports(adapter: str, mutant: Mutant) -> bool:
    case = mutant.case
    try:
        find_backend(adapter).capabilities.check(
            name=adapter,
            device="cpu",
            precision=case.precision,
            world_size=mutant.world_size,
            find_unused_parameters=case.find_unused_parameters,
            grad_compression=case.grad_compression,
        )
    except UnsupportedError:
        return False
    return True


def _group_and_name(item: tuple[str, Mutant]) -> tuple[str, str, str]:
    name, mutant = item
    return mutant.case.precision, mutant.case.grad_compression, name


PAIRS = [
    (adapter, name)
    for adapter in (*DISTRIBUTED, *IN_FLOAT32, BY_HAND)
    for name, mutant in sorted(MUTANTS.items(), key=_group_and_name)
    if mutant.is_fault_of(_short(adapter)) and _supports(adapter, mutant)
]


def _taking_turns() -> set[tuple[str, str]]:
    """One pair for each mutant among the adapters whose ranks hold all weights, in turns; and all other pairs."""
    kept = {(adapter, name) for adapter, name in PAIRS if _short(adapter) not in REPLICATED}
    for number, name in enumerate(MUTANTS):
        adapters = [adapter for adapter, other in PAIRS if other == name and _short(adapter) in REPLICATED]
        kept |= {(adapters[number % len(adapters)], name)} if adapters else set()
    return kept


PARAMETERS = in_ci(_taking_turns(), PAIRS)


def _key(mutant: Mutant) -> GroupKey:
    case = mutant.case
    kinds = (case.precision, case.find_unused_parameters, case.grad_compression, case.keeps_nonfinite)
    return GroupKey(mutant.world_size, *kinds)


@pytest.fixture(scope="module")
def outcomes_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OutcomesOf:
    """What each adapter does under those mutants of this session that fit one group of ranks, which runs once."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [test.callspec.params for test in tests if test.function is test_a_mutant_is_caught_by_its_check]

    @functools.cache
    def outcomes(adapter: str, key: GroupKey) -> Outcomes:
        mutants = [MUTANTS[one["name"]] for one in asked if one["adapter"] == adapter]
        mine = [mutant for mutant in mutants if _key(mutant) == key]
        return _run(tmp_path_factory.mktemp("mutants"), adapter, key, mine)

    return outcomes


def _run(directory: Path, adapter: str, key: GroupKey, mutants: list[Mutant]) -> Outcomes:
    """Starts one group of ranks, which take each mutant's case with its fault and, as a control, without it."""
    controls = {other.case.name: other.case for other in mutants}
    files = {}
    for case in controls.values():
        if any(training.resume == "reference" for training in case.trainings):
            files[case.name] = directory / f"{case.name}.pt"
            alone = train_alone(case, key.world_size, device="cpu", float64=_float64(adapter))
            torch.save(alone["state"], files[case.name])
    # What leaves a training half done comes after what does not, and last of all what ends the group.
    mutated = {other.mutated_case_name: other for other in mutants}
    cases = [*controls.values(), *(dataclasses.replace(one.case, name=name) for name, one in mutated.items())]
    cases.sort(key=lambda case: case.scene == "refused_training")
    cases.sort(key=lambda case: case.name in mutated and bool(mutated[case.name].words_of_stop(_short(adapter))))
    group = Group(
        adapter,
        key,
        directory / "group",
        single_states=files,
        module="tests.mutant_rank",
        compose=forked_job,
    )
    return run_group(group, cases)


def _verify(adapter: str, mutant: Mutant, outcome: Outcome) -> None:
    """Holds what a case showed, mutated or not, to the mutant's check.

    Raises:
        Violation: It does not hold.
    """
    if isinstance(outcome, Breakdown):
        raise Violation("the case to complete", outcome.message, outcome.rank)
    memory = {}
    if any(training.resume == "reference" for training in mutant.case.trainings):
        memory["alone"] = train_alone(mutant.case, mutant.world_size, device="cpu", float64=_float64(adapter))
    all_checks()[mutant.check_id].verify(
        Evidence(adapter, mutant.case, mutant.world_size, "cpu", outcome, memory, _float64(adapter))
    )


@pytest.mark.parametrize(("adapter", "name"), PARAMETERS)
def test_a_mutant_is_caught_by_its_check(outcomes_of: OutcomesOf, adapter: str, name: str) -> None:
    """The same check passes on the same case of the same ranks without the fault, and fails with it as announced."""
    require_backend(adapter)
    mutant = MUTANTS[name]
    outcomes = outcomes_of(adapter, _key(mutant))
    _verify(adapter, mutant, outcomes[mutant.case.name])
    mutated = outcomes[mutant.mutated_case_name]
    # A fault that stops the training leaves the check without evidence, so that it fails.
    assert isinstance(mutated, Breakdown) == (mutant.words_of_stop(_short(adapter)) is not None), mutated
    assert mutant.words_of(_short(adapter)), "it must say with which words its check fails"
    with pytest.raises(Violation, match=re.escape(mutant.words_of(_short(adapter)))):
        _verify(adapter, mutant, mutated)


def _results(adapter: str, directory: Path, check_id: str) -> list[Result]:
    options = ContractOptions(num_processes=[2, 1], precision=["fp32"], check=[check_id])
    suite = Suite(adapter, directory, options, compose=forked_job)
    # A job takes long, and each of them shows the fault.
    instances = suite.instances[:1] if suite.instances[0].case.is_job else suite.instances
    return [suite.judge(instance) for instance in instances]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Result]]:
    """What the adapter that all the broken ones are made from shows of a check."""

    @functools.cache
    def results(check_id: str) -> list[Result]:
        return _results(BY_HAND, tmp_path_factory.mktemp("sound"), check_id)

    return results


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(("name", "check_id", "words"), [(name, *facts) for name, facts in ADAPTERS.items()])
def test_a_broken_adapter_is_caught_by_its_check(
    sound: Callable[[str], list[Result]], tmp_path: Path, name: str, check_id: str, words: str
) -> None:
    assert {result.state for result in sound(check_id)} == {State.PASSED}, sound(check_id)
    broken = [
        result
        for result in _results(f"tests.mutants.adapters:{name}", tmp_path, check_id)
        if result.state is State.FAILED
    ]
    assert broken
    assert all(words in result.reason for result in broken), [result.reason for result in broken]


def test_every_check_has_a_mutant() -> None:
    """Deleting a check leaves a mutant uncaught, or the check's docstring says why none is possible."""
    named = {mutant.check_id for mutant in MUTANTS.values()} | {check_id for check_id, _ in ADAPTERS.values()}
    without = [check for check in all_checks().values() if check.id not in named]
    assert all("No mutant:" in check.explanation for check in without), [check.id for check in without]
    assert named <= set(all_checks())


def test_there_are_mutants_of_every_adapter() -> None:
    counts = Counter(_short(adapter) for adapter, _ in PAIRS)
    assert all(counts[adapter] >= 15 for adapter in REPLICATED), counts
    sharded = [name for name in DISTRIBUTED if find_backend(name).capabilities.shards_weights]
    assert sharded
    assert all(counts[adapter] >= 8 for adapter in sharded), counts
    assert all(counts[adapter] >= 4 for adapter in IN_FLOAT32), counts
