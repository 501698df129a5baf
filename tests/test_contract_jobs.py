"""The clauses of the contract about whole jobs: refusals, a hostile environment, ranks that fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.check import State
from contract.options import ContractOptions
from contract.suite import Instance, Suite
from tests.launching import OF_EACH_STARTER, require_backend
from tests.test_contract import BY_HAND, JOB_CHECKS, instances


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    options = ContractOptions(check=JOB_CHECKS)
    return functools.cache(lambda adapter: Suite(adapter, tmp_path_factory.mktemp("jobs"), options))


def _jobs() -> Iterator[Any]:
    """Those of one adapter for each starter, and of the example, which is started as ddp is."""
    yield from instances(JOB_CHECKS, ["single", "ddp"])
    for parameter in instances(JOB_CHECKS, [name for name in OF_EACH_STARTER if name != "ddp"]):
        # tests/test_watchdog.py has a rank of each of them hang, too.
        hangs = parameter.values[1].case.name == "rank-hangs"
        marks = [*parameter.marks, *([pytest.mark.exhaustive] if hangs else [])]
        yield pytest.param(*parameter.values, id=parameter.id, marks=marks)
    yield from instances(JOB_CHECKS, [BY_HAND], pytest.mark.exhaustive)


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(("adapter", "instance"), _jobs())
def test_clause(suite: Callable[[str], Suite], adapter: str, instance: Instance) -> None:
    require_backend(adapter)
    result = suite(adapter).judge(instance)
    assert result.state in (State.PASSED, State.UNSUPPORTED), result.reason
