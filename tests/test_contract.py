"""The contract, held by every backend of ours and by the example of somebody else's: one test a clause and case.

What whole jobs show is in tests/test_contract_jobs.py, which another worker can do meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from backends.interface import KnownFailure, Signs
from backends.registry import find_backend
from contract.cases import ALL, BITS, STATE, STATE_FP16, Case
from contract.check import Evidence, State, Violation, all_checks
from contract.groups import Breakdown, Compose, GroupKey, Outcome, run_group
from contract.patience import stretched
from contract.suite import Instance, Result, Suite, Verdict, summarise
from launch.cli import main
from launch.engines.interface import Engine, Ranks
from launch.job import Job, compose_job
from tests.by_hand import ByHandBackend
from tests.forked.client import forked_job, launched_job
from tests.launching import DISTRIBUTED, lockstep, require_backend, train

BY_HAND = "tests.by_hand:ByHandBackend"
ADAPTERS = ("single", *DISTRIBUTED, BY_HAND)


JOB_CHECKS = [check.id for check in all_checks().values() if all(case.is_job for case in check.cases)]
GROUP_CHECKS = [check_id for check_id in all_checks() if check_id not in JOB_CHECKS]


def instances(check_ids: list[str]) -> list[Any]:
    """Every case of these checks, for every adapter."""
    return [
        pytest.param(adapter, instance, id=f"{adapter.partition(':')[0]}-{instance}", marks=_marks(instance))
        for adapter in ADAPTERS
        for instance in Suite(adapter, Path(), check_ids=check_ids).instances
    ]


def _marks(instance: Instance) -> list[pytest.MarkDecorator]:
    """The short tests hold each adapter to the core: one and two ranks in fp32."""
    case = instance.case
    is_core = case.precision == "fp32" and instance.world_size <= 2 and not case.find_unused_parameters
    return [] if is_core and not case.is_job else [pytest.mark.slow]


Suites = Callable[[str], Suite]


@pytest.fixture(scope="session")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Suites:
    """One suite an adapter, so that each of its groups is started once for all tests."""
    made: dict[str, Suite] = {}

    def suite(adapter: str) -> Suite:
        require_backend(adapter)
        if adapter not in made:
            directory = tmp_path_factory.mktemp("contract")
            made[adapter] = Suite(adapter, directory, check_ids=GROUP_CHECKS, compose=_launched_once())
        return made[adapter]

    return suite


def _launched_once() -> Compose:
    """The first group of each size, that in fp32, has the backend's own launcher: with two ranks in new processes."""
    launched: set[int] = set()

    def compose(engine: Engine, ranks: Ranks, run_directory: Path, signs: Signs) -> Job:
        if ranks.num_processes > 1 and ranks.num_processes not in launched:
            launched.add(ranks.num_processes)
            launch = compose_job if ranks.num_processes == 2 else launched_job
            return launch(engine, ranks, run_directory, signs)
        return forked_job(engine, ranks, run_directory, signs)

    return compose


@pytest.mark.parametrize(("adapter", "instance"), instances(GROUP_CHECKS))
def test_clause(suites: Suites, adapter: str, instance: Instance) -> None:
    result = suites(adapter).judge(instance)
    if result.state is State.EXPECTED_FAILURE:
        pytest.xfail(f"{result.reason} ({result.link})")
    # What is unsupported has by now been asked for, and refused.
    assert result.state in (State.PASSED, State.UNSUPPORTED), result.reason


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_expected_failure_is_out_of_date(suites: Suites, adapter: str) -> None:
    suite = suites(adapter)
    verdicts = summarise(list(suite.results()), suite.known_failures)
    assert [verdict.check.id for verdict in verdicts if verdict.state is State.FAILED] == []


def test_our_backends_end_with_the_same_bits(suites: Suites) -> None:
    finals = []
    for backend in DISTRIBUTED:
        evidence = suites(backend).evidence(BITS, 2)
        assert isinstance(evidence, Evidence)
        assert len(evidence.ranks[0][0]["steps"]) == 20
        finals += [seen[0]["steps"][-1]["weights"] for seen in evidence.ranks]
    for weights in finals[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in finals[0].items())


STATES = [
    pytest.param(case, *pair, id=f"{case.precision}-{'-to-'.join(pair)}")
    for case in (STATE, STATE_FP16)
    for pair in permutations(DISTRIBUTED, 2)
    if all(case.precision in find_backend(name).capabilities.precisions["cpu"] for name in pair)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "saver", "loader"), STATES)
def test_state_saved_under_one_backend_goes_on_under_another(
    suites: Suites, tmp_path: Path, case: Case, saver: str, loader: str
) -> None:
    """On two ranks both do the same arithmetic, so the rest of the training has the same bits."""
    require_backend(loader)
    evidence = suites(saver).evidence(case, 2)
    assert isinstance(evidence, Evidence)
    whole: dict[str, Any] = evidence.ranks[0][0]
    torch.save(whole["state"], tmp_path / "state.pt")
    outcomes = run_group(
        loader,
        find_backend(loader),
        GroupKey(2, case.precision, find_unused_parameters=False),
        [case],
        tmp_path / "group",
        device="cpu",
        # The place of the state of one process is taken by that of the other backend.
        single_states={case.name: tmp_path / "state.pt"},
        compose=forked_job,
    )
    outcome = outcomes[case.name]
    assert isinstance(outcome, list), outcome
    for _, _, resumed in outcome:
        assert len(resumed["steps"]) == len(whole["steps"]) - 3
        for one, other in zip(whole["steps"][3:], resumed["steps"], strict=True):
            assert other["learning_rates"] == one["learning_rates"]
            assert other["micro_batches"][0]["scale"] == one["micro_batches"][0]["scale"]
            assert all(torch.equal(other["weights"][name], tensor) for name, tensor in one["weights"].items())


def test_the_example_is_short() -> None:
    assert len(Path(__file__).with_name("by_hand.py").read_text().splitlines()) < 80


# Groups that break.


def _broken(directory: Path) -> tuple[dict[str, Outcome], int]:
    """What ten cases show in ranks that break in each of them, and the number of starts."""
    cases = [case for case in ALL if case.precision == "fp32" and not case.is_job][:10]
    outcomes = run_group(
        BY_HAND,
        find_backend(BY_HAND),
        GroupKey(1, "fp32", find_unused_parameters=False),
        cases,
        directory,
        device="cpu",
        single_states={},
        module="tests.breaking_rank",
    )
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
    not_run = "not run: the group was started 8 times, the last one ended in 'construct' with: rank 0: "
    assert messages[7:] == [f"{not_run}ArithmeticError: there is no group"] * 3


@pytest.mark.parametrize(("seconds", "holds"), [(21.0, True), (49.0, True), (51.0, False)])
def test_a_busy_machine_is_not_held_against_an_adapter(seconds: float, holds: bool) -> None:
    """Where it took 30 s to come to the fault, it may take longer than on an idle machine to end after it."""
    check = all_checks()["C43"]
    (case,) = (case for case in check.cases if case.name == "rank-exits")
    seen = {
        **{"faulty_rank": 1, "return_code": 1, "message": "rank 1: SystemExit: 3", "left": [], "status": "failed"},
        **{"timeout": 10, "seconds_to_fault": 30.0, "seconds": seconds},
    }
    with nullcontext() if holds else pytest.raises(Violation, match="an end within 50 s of the fault, saw 51 s"):
        check.verify(Evidence(BY_HAND, case, 2, "cpu", [seen]))


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
    """Ranks are handed the weights of a checkpoint in one order, or they would add up different ones."""
    adapter = f"{__name__}:BroadcastingBackend"
    options = ("--task", "token-tagging", "--num-processes", "2", "--global-batch-size", "16", "--max-steps", "3")
    train(adapter, tmp_path / "whole", *options, "--save-every", "2")
    resumed = train(adapter, tmp_path / "resumed", *options, "--resume", tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "record.json").read_text())
    assert resumed["resumed_from"]["step"] == 2
    assert [rank["weights_sha256"] for rank in resumed["ranks"]] == [rank["weights_sha256"] for rank in whole["ranks"]]


# The command.


def test_command_prints_a_row_a_check_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ("--num-processes", "2", "--precision", "fp32", "--check", "C16,C01,C04", "--json", target)
    done = lockstep("contract", BY_HAND, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("C")}
    assert sorted(rows) == ["C01", "C04", "C16"]
    assert all(" passed " in row for row in rows.values())
    # Whoever waits for a file to grow sees which group has begun, before any of its rows.
    assert lines.index("2 ranks, fp32: 0 of 6 results so far") < lines.index(rows["C16"])
    assert done.stdout.splitlines()[-1].startswith(f"{BY_HAND} on cpu: 3 passed in")
    report = json.loads(target.read_text())
    assert report["adapter"] == BY_HAND
    assert [check["state"] for check in report["checks"]] == ["passed"] * 3
    seen = {result["case"] for result in report["checks"][2]["results"]}
    assert seen == {"accumulation-1", "accumulation-2", "accumulation-4", "wide"}


@pytest.mark.slow
def test_command_works_from_anywhere_with_a_relative_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter.py").write_text(Path(__file__).with_name("by_hand.py").read_text())
    options = ("--num-processes", "2", "--check", "C16")
    done = lockstep("contract", "adapter:ByHandBackend", *options, cwd=tmp_path, env={"PYTHONPATH": "mine"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failure_says_what_was_expected_seen_and_where(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = lockstep(
        "contract", "tests.mutants:LonelyBackend", "--num-processes", "2", "--check", "C16", "--json", target
    )
    assert done.returncode == 1
    assert "breaks the contract" in done.stderr
    (check,) = json.loads(target.read_text())["checks"]
    assert check["state"] == "failed"
    assert "(C01)" in check["reason"]
    assert "rank 0: expected a world size of 2, saw 1" in check["reason"]
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("C16"))
    assert check["reason"] in row  # the whole of it in one line, however long


@pytest.mark.slow
def test_a_hang_is_ended_and_named_within_half_a_minute(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    began = time.monotonic()
    options = ("--num-processes", "2", "--precision", "fp32", "--check", "C23,C24", "--json", target)
    done = lockstep("contract", "tests.mutants:HangingBackend", *options)
    # The group is started a second time for what the first left undone, which hangs as well.
    assert time.monotonic() - began < stretched(2 * 30 + 30)
    assert done.returncode == 1
    first, second = json.loads(target.read_text())["checks"]
    for check in (first, second):
        assert check["state"] == "failed"
        assert "rank 1" in check["reason"]
        assert "stuck" in check["reason"]


def test_explain() -> None:
    done = lockstep("contract", "--explain", "C07")
    assert done.returncode == 0
    assert done.stdout.startswith(f"C07  {all_checks()['C07'].clause[:40]}")
    assert "G7 " in done.stdout
    assert "\n  Backend.setup: No weight of rank 0 changes" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name an adapter"),
        (("nothing",), "there is no backend 'nothing'"),
        (("no.such:Thing",), "cannot be imported"),
        (("tests.by_hand:os",), "not a subclass"),
        (("ddp", "--check", "C99"), "--check C99"),
        (("ddp", "--check", ""), "--check"),
        (("ddp", "--precision", "fp8"), "--precision fp8"),
        (("ddp", "--num-processes", "0"), "--num-processes 0"),
        (("ddp", "--num-processes", "two"), "--num-processes two"),
        (("ddp", "--num-processes", "1,"), "--num-processes 1,"),
        (("ddp", "--num-processes", "100000"), "--num-processes 100000"),
        (("ddp", "--device", "tpu"), "--device tpu"),
        (("ddp", "--device", "cuda"), "--device cuda"),
        (("ddp", "--json", "/nowhere/at/all.json"), "/nowhere/at"),
        (("ddp", "--json", __file__), "exists already"),
        (("ddp", "--json", "/proc/out.json"), "--json /proc/out.json"),
        (("ddp", "--check", "C24", "--num-processes", "1"), "no check fits"),
        (("ddp", "--wrong"), "--wrong"),
        (("ddp", "horovod"), "horovod"),
        (("--explain",), "--explain"),
        (("--explain", "C99"), "--explain C99"),
        (("ddp", "--explain", "C01"), "--explain takes no adapter"),
    ],
    ids=str,
)
def test_bad_requests_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "contract", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1, printed.err
    assert words in printed.err
    assert not printed.out


def test_an_adapter_that_cannot_run_here_proves_nothing() -> None:
    if find_backend("apex").unavailable_reason() is None:
        pytest.skip("apex runs here")
    done = lockstep("contract", "apex")
    assert done.returncode == 2
    assert "nothing was proven" in done.stderr
    assert "unavailable" in done.stdout
    assert "passed" not in done.stdout


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
    suite = Suite(f"{__name__}:KnownToFailBackend", tmp_path, world_sizes=[1], check_ids=["C06", "C10"])
    verdicts = summarise(list(suite.results()), suite.known_failures)
    assert [verdict.state for verdict in verdicts] == [State.EXPECTED_FAILURE, State.FAILED]
    assert "tells no transport" in verdicts[0].reason
    assert "https://example.org/1" in verdicts[0].reason
    assert "passes: drop it" in verdicts[1].reason


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


def test_pytest_leaves_nothing_of_the_contract_out() -> None:
    """Every check is judged for every adapter of ours, and CI names those that may not be missing."""
    judged = instances(GROUP_CHECKS) + instances(JOB_CHECKS)
    for adapter in ADAPTERS:
        ids = {param.values[1].check.id for param in judged if param.values[0] == adapter}
        assert ids == set(all_checks())
    required = os.environ.get("LOCKSTEP_REQUIRE")
    assert required is None or set(DISTRIBUTED) <= set(required.split(","))


def test_ranks_that_would_want_more_gpus_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contract.suite.count_gpus", lambda: 1)
    suite = Suite("ddp", tmp_path, device="cuda", world_sizes=[2], precisions=["fp32"], check_ids=["C16"])
    capabilities = replace(suite.row.capabilities, ranks_may_share_gpu=False)
    suite.row = replace(suite.row, declare=lambda: capabilities)
    result = suite.judge(suite.instances[0])
    assert result.state is State.UNAVAILABLE
    assert result.reason == "ddp wants a GPU for each of 2 ranks, here are 1"
