"""One cache for the whole session, apart from the user's; the tests importable in whatever it starts."""

from __future__ import annotations

import os

import pytest

from launch.engines import PROJECT_DIRECTORY


@pytest.fixture(autouse=True, scope="session")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["LOCKSTEP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["PYTHONPATH"] = str(PROJECT_DIRECTORY)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def hidden_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started runs on the CPU, as the expectations of all tests say that are not about GPUs."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs images comes last: they may be in the making."""
    items.sort(key=lambda item: item.get_closest_marker("docker") is not None)
