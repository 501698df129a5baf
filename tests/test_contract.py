"""Every backend and the example of an adapter are held to the contract: one test for each clause and case.

The clauses about whole jobs are in tests/test_contract_jobs.py, which another worker can run at the same time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.capabilities import Signs
from backends.registry import find_backend
from contract.case import Case
from contract.cases import BITS, STATE, STATE_FP16
from contract.check import Evidence, State, all_checks
from contract.groups import Compose, Group, GroupKey, run_group
from contract.options import ContractOptions
from contract.suite import Instance, Suite
from contract.verdicts import summarise
from launch.job import Job, compose_job
from launch.starters.interface import Ranks, Starter
from tests.by_hand import ByHandBackend
from tests.forked.client import forked_job, launched_job
from tests.launching import DISTRIBUTED, IN_FLOAT32, OF_EACH_STARTER, WHOLE, require_backend, train
from tests.sparing import in_ci, ring

BY_HAND = "tests.by_hand:ByHandBackend"
DP_ON_CPU = "tests.dp_on_cpu:DPOnCpu"
ADAPTERS = ("single", DP_ON_CPU, *DISTRIBUTED, *IN_FLOAT32, BY_HAND)
JOB_CHECKS = [check.id for check in all_checks().values() if all(case.is_job for case in check.cases)]
GROUP_CHECKS = [check_id for check_id in all_checks() if check_id not in JOB_CHECKS]


def instances(check_ids: list[str], adapters: Sequence[str] = ADAPTERS, *marks: pytest.MarkDecorator) -> list[Any]:
    """Every case of these checks, for each adapter, with these marks beside those of its kind."""
    return [
        pytest.param(
            adapter,
            instance,
            id=f"{adapter.partition(':')[0]}-{instance}",
            marks=[*_marks(instance), *_spared(adapter, instance), *marks],
        )
        for adapter in adapters
        for instance in Suite(adapter, Path(), ContractOptions(check=check_ids)).instances
    ]


def _marks(instance: Instance) -> list[pytest.MarkDecorator]:
    """The short tests hold each adapter to the core of the contract: one and two ranks in fp32."""
    case = instance.case
    is_plain = not case.find_unused_parameters and case.grad_compression == "none" and not case.keeps_nonfinite
    is_core = case.precision == "fp32" and instance.world_size <= 2 and is_plain
    return [] if is_core and not case.is_job else [pytest.mark.slow]


def _spared(adapter: str, instance: Instance) -> list[pytest.MarkDecorator]:
    """In CI, four ranks are tried of DDP and FSDP2, three also of one adapter for each starter and of DeepSpeed.

    One rank is tried in half precision of `single` and of DataParallel, which have no more; others compute with two.
    """
    most = 4 if adapter in ("ddp", "fsdp2") else 3 if adapter in (*OF_EACH_STARTER, *IN_FLOAT32) else 2
    alone = adapter in ("single", DP_ON_CPU) or instance.case.precision == "fp32"
    return [] if instance.world_size <= most and (alone or instance.world_size > 1) else [pytest.mark.exhaustive]


Suites = Callable[[str], Suite]


@pytest.fixture(scope="session")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Suites:
    """One suite for each adapter, so that each of its groups is started once for all tests."""
    made: dict[str, Suite] = {}

    def suite(adapter: str) -> Suite:
        require_backend(adapter)
        if adapter not in made:
            directory = tmp_path_factory.mktemp("contract")
            made[adapter] = Suite(
                adapter, directory, ContractOptions(check=GROUP_CHECKS), compose=_launched_once(adapter)
            )
        return made[adapter]

    return suite


def _launched_once(adapter: str) -> Compose:
    """The first group of each size has the backend's own launcher; with two ranks, it starts new processes.

    Where several backends have the same launcher, it does so for one of them.
    """
    launched: set[int] = set()
    starts_processes = adapter in (*OF_EACH_STARTER, BY_HAND)

    def compose(starter: Starter, ranks: Ranks, run_directory: Path, signs: Signs) -> Job:
        if ranks.num_processes > 1 and ranks.num_processes not in launched:
            launched.add(ranks.num_processes)
            launch = compose_job if ranks.num_processes == 2 and starts_processes else launched_job
            return launch(starter, ranks, run_directory, signs)
        return forked_job(starter, ranks, run_directory, signs)

    return compose


@pytest.mark.parametrize(("adapter", "instance"), instances(GROUP_CHECKS))
def test_clause(suites: Suites, adapter: str, instance: Instance) -> None:
    result = suites(adapter).judge(instance)
    if result.state is State.EXPECTED_FAILURE:
        pytest.xfail(f"{result.reason} ({result.link})")
    # The suite has by now asked the adapter for what is unsupported, and the adapter has refused it.
    assert result.state in (State.PASSED, State.UNSUPPORTED), result.reason


@pytest.mark.slow
@pytest.mark.parametrize("adapter", in_ci([DP_ON_CPU], ADAPTERS))  # it alone has such failures
def test_no_expected_failure_is_out_of_date(suites: Suites, adapter: str) -> None:
    suite = suites(adapter)
    verdicts = summarise(list(suite.results()), suite.known_failures)
    assert [verdict.check.id for verdict in verdicts if verdict.state is State.FAILED] == []


def test_our_backends_end_with_the_same_bits(suites: Suites) -> None:
    """Those under which each rank computes whole tensors."""
    finals = []
    for backend in WHOLE:
        evidence = suites(backend).evidence(BITS, 2)
        assert isinstance(evidence, Evidence)
        assert len(evidence.ranks[0][0]["steps"]) == 100
        finals += [seen[0]["steps"][-1]["weights"] for seen in evidence.ranks]
    for weights in finals[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in finals[0].items())


STATES = [
    pytest.param(
        case,
        *pair,
        id=f"{case.precision}-{'-to-'.join(pair)}",
        marks=[] if pair in ring(DISTRIBUTED) else [pytest.mark.exhaustive],
    )
    for case in (STATE, STATE_FP16)
    for pair in permutations(DISTRIBUTED, 2)
    if all(case.precision in find_backend(name).capabilities.precisions["cpu"] for name in pair)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "saver", "loader"), STATES)
def test_state_saved_under_one_backend_goes_on_under_another(
    suites: Suites, tmp_path: Path, case: Case, saver: str, loader: str
) -> None:
    """On two ranks, both do the same arithmetic, so the rest has the same bits, unless one computes parts."""
    require_backend(loader)
    shards = {find_backend(name).capabilities.shards_weights for name in (saver, loader)}
    tolerance = 0 if len(shards) == 1 else 1e-12
    evidence = suites(saver).evidence(case, 2)
    assert isinstance(evidence, Evidence)
    whole: dict[str, Any] = evidence.ranks[0][0]
    torch.save(whole["state"], tmp_path / "state.pt")
    group = Group(
        loader,
        GroupKey(2, case.precision, find_unused_parameters=False),
        tmp_path / "group",
        # In place of the state of one process, that of the other backend.
        single_states={case.name: tmp_path / "state.pt"},
        compose=forked_job,
    )
    outcomes = run_group(group, [case])
    outcome = outcomes[case.name]
    assert isinstance(outcome, list), outcome
    for _, _, resumed in outcome:
        assert len(resumed["steps"]) == len(whole["steps"]) - 3
        for one, other in zip(whole["steps"][3:], resumed["steps"], strict=True):
            assert other["learning_rates"] == one["learning_rates"]
            assert other["micro_batches"][0]["scale"] == one["micro_batches"][0]["scale"]
            for name, tensor in one["weights"].items():
                torch.testing.assert_close(other["weights"][name], tensor, rtol=tolerance, atol=tolerance)


def test_the_example_is_short() -> None:
    assert len(Path(__file__).with_name("by_hand.py").read_text().splitlines()) < 80


def test_pytest_leaves_nothing_of_the_contract_out() -> None:
    """Every check is judged for every adapter of ours, and CI names those that may not be missing."""
    judged = instances(GROUP_CHECKS) + instances(JOB_CHECKS)
    for adapter in ADAPTERS:
        ids = {param.values[1].check.id for param in judged if param.values[0] == adapter}
        assert ids == set(all_checks())
    required = os.environ.get("LOCKSTEP_REQUIRE")
    assert required is None or {*DISTRIBUTED, *IN_FLOAT32} <= set(required.split(","))


# Weights that are loaded.


class BroadcastingBackend(ByHandBackend):
    """Loads weights on rank 0 and sends them from there, one after the other."""

    def load_weights(self, model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
        own = self.unwrap(model).state_dict()
        for name, weight in weights.items():
            own[name].copy_(self.all_reduce(weight if self.rank == 0 else torch.zeros_like(weight)))


@pytest.mark.slow
@pytest.mark.processes  # forked ranks would share what safetensors draws its order from
def test_an_adapter_may_communicate_while_it_loads_weights(tmp_path: Path) -> None:
    """All ranks load the weights of a checkpoint in the same order, or they would add up different ones."""
    adapter = f"{__name__}:BroadcastingBackend"
    options = ("--task", "token-tagging", "--num-processes", "2", "--global-batch-size", "16", "--max-steps", "3")
    train(adapter, tmp_path / "whole", *options, "--save-every", "2")
    resumed = train(adapter, tmp_path / "resumed", *options, "--resume", tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "record.json").read_text())
    assert resumed["resumed_from"]["step"] == 2
    assert [rank["weights_sha256"] for rank in resumed["ranks"]] == [rank["weights_sha256"] for rank in whole["ranks"]]
