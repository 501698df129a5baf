"""A job on one machine listens to that machine alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import LOCKSTEP, require_backend, wait_for_steps
from tests.sparing import in_ci

pytestmark = [pytest.mark.launchers, pytest.mark.slow]

# mpirun opens one port more, on all interfaces, whatever it is told.
WAYS = [("ddp", "torchrun"), ("ddp", "fork"), ("ddp", "spawn"), ("accelerate", "accelerate"), ("horovod", "horovodrun")]


@pytest.mark.parametrize(("backend", "start_method"), in_ci([WAYS[0], WAYS[1], WAYS[4]], WAYS))
def test_only_loopback_is_listened_on(tmp_path: Path, backend: str, start_method: str) -> None:
    require_backend(backend)
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--max-steps", "1000", "--start-method", start_method)
    job = subprocess.Popen(
        [str(LOCKSTEP), backend, *options, "--output-dir", str(run)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_steps(run)
        addresses = {
            connection.laddr.ip
            for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
    finally:
        job.terminate()
        job.wait(timeout=180)
    assert addresses == {"127.0.0.1"}
