"""One cache for the whole session, apart from the user's."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["LOCKSTEP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
