"""An engine with the images; without an engine these tests are skipped, with REQUIRE_DOCKER=1 they fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import skip_or_fail

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def engine() -> None:
    done = subprocess.run(["docker", "version"], capture_output=True, text=True) if _has_docker() else None
    reason = None
    if done is None or done.returncode:
        reason = "no Docker engine answers (tests/docker/engine.sh start)"
    elif os.getuid() != 0:
        reason = "only root can be somebody else, and check what becomes of that"
    skip_or_fail(reason, "REQUIRE_DOCKER")


def _has_docker() -> bool:
    return subprocess.run(["sh", "-c", "command -v docker"], capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def images(engine: None) -> dict[str, float]:
    """The size of each backend's image in GiB; made first where need be, which takes minutes."""
    done = subprocess.run([HERE / "images.sh"], capture_output=True, text=True, cwd=PROJECT_DIRECTORY)
    assert done.returncode == 0, done.stdout + done.stderr
    # "ddp: 0 s, 1.42 GiB"
    lines = [line.split() for line in done.stdout.splitlines() if line.endswith(" GiB")]
    return {words[0].rstrip(":"): float(words[-2]) for words in lines}
