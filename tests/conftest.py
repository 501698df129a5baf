"""What all tests share: a cache of their own, the server of forked processes, groups, failures told at once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from launch.starters.interface import PROJECT_DIRECTORY
from tests import launching
from tests.forked.client import SESSION_VARIABLE, interpreter, run_job_of_the_contract, session
from tests.slurm_cluster import running_cluster

_SESSION = pytest.StashKey[ExitStack]()


class _FailuresAtOnce:
    """Prints the name of a test that fails, and why, when it fails instead of at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # several workers would go on without the file
            pytest.exit(f"{report.nodeid} cannot be collected: {report.longreprtext}", returncode=2)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else report.longreprtext
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when}): {' '.join(reason.split())[:1000]}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[_SESSION] = ExitStack()
        config.stash[_SESSION].enter_context(session())
        config.pluginmanager.register(_FailuresAtOnce(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SESSION in config.stash:
        config.stash[_SESSION].close()


@pytest.fixture(autouse=True, scope="session")
def cache_directory() -> None:
    os.environ["LOCKSTEP_CACHE"] = str(Path(os.environ[SESSION_VARIABLE]) / "cache")
    os.environ["PYTHONPATH"] = str(PROJECT_DIRECTORY)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Threads of a worker would wait for each other at every operation, since the other workers have the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def way_of_starting(request: pytest.FixtureRequest) -> Iterator[None]:
    ways = [way for way in ("processes", "launchers") if request.node.get_closest_marker(way) is not None]
    with launching.starting(*ways[:1] or ["forked"]):
        yield


@pytest.fixture(autouse=True)
def hidden_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started runs on the CPU, as the expectations of all tests say that are not about GPUs."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that this process starts with its own interpreter are forks of one that has loaded all libraries."""
    monkeypatch.setattr(sys, "executable", interpreter())


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch, forked_programs: None) -> None:
    """What a suite in this process starts for clauses about whole jobs is forked, where it may be."""
    monkeypatch.setattr("contract.jobs._run", run_job_of_the_contract)


@pytest.fixture
def namespaces() -> None:
    """Skips where no network namespaces can be made, unless LOCKSTEP_REQUIRE lists them."""
    lacks = os.geteuid() != 0 or shutil.which("ip") is None
    launching.require("namespaces", "network namespaces need root and iproute2" if lacks else None)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[None]:
    with running_cluster():
        yield


# Files that take long: begun last, one of them would keep one worker busy while the other has nothing left to do.
_FIRST = (
    *("test_contract", "test_contract_jobs", "test_mutants", "test_resume", "test_stopping", "test_lifetimes"),
    *("test_watchdog", "test_nodes", "test_race", "test_processors", "test_parity", "test_failures"),
    *("test_main_job", "test_bare", "test_peers", "test_turns", "test_gate_command", "test_slurm"),
    *("test_diagnosis", "test_compile", "test_contract_command", "test_elastic", "test_dry_run", "test_shared_memory"),
    *("test_text_classification", "test_kubernetes", "test_verify", "test_tuning"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first; then what needs images, which are being made meanwhile; what is short comes last."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("docker") is not None:
            return 1
        return 0 if item.path.stem in _FIRST else 2

    items.sort(key=place)
