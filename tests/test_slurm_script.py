"""The script of a job of SLURM, with stand-ins for SLURM's own programs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.command import planned
from tests.launching import wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]

# It says how it is started, and counts how often it is told to stop until it is told otherwise.
_SRUN = """#!/bin/bash
echo "${@: -1}" >"$output_dir/started"
count() { echo stop >>"$output_dir/stops"; }
trap count TERM
echo $$ >"$output_dir/node0.pid"
until [[ -e $output_dir/go-on ]] || ((SECONDS > 60)); do sleep 0.05; done
"""


@pytest.fixture
def script(tmp_path: Path) -> Start:
    """Starts the script of a job in a directory with a checkpoint, in SLURM's place."""
    for name, text in {"srun": _SRUN, "scontrol": "#!/bin/bash\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "node0" / "checkpoints" / "step1").mkdir(parents=True)

    def start(restarts: int, *options: str) -> subprocess.Popen[bytes]:
        engine, _ = planned(["ddp", "--engine", "slurm", *options, "--output-dir", str(tmp_path)])
        variables = {
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(restarts),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
        return subprocess.Popen(["bash", "-c", engine.script()], env=variables)

    return start


def test_a_requeued_job_continues_what_it_has_saved_itself(tmp_path: Path, script: Start) -> None:
    (tmp_path / "go-on").touch()

    def started(*options: str) -> str:
        assert script(1, *options).wait(timeout=60) == 0
        return (tmp_path / "started").read_text().strip()

    assert started() == "--resume=latest"
    assert started("--overwrite") == "--overwrite"
    (tmp_path / "job7.begun").touch()
    os.utime(tmp_path / "job7.begun", (0, 0))
    assert started("--overwrite") == "--resume=latest"
    assert not [*tmp_path.glob("job*")]


def test_the_end_of_the_time_stops_no_job_that_stops_already(tmp_path: Path, script: Start) -> None:
    job, stops = script(0), tmp_path / "stops"
    wait_until((tmp_path / "node0.pid").exists, "the job")
    job.send_signal(signal.SIGTERM)
    wait_until(stops.exists, "a request to stop")
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.3)  # in which it would have been passed on
    assert stops.read_text() == "stop\n"
    job.send_signal(signal.SIGTERM)
    wait_until(lambda: stops.read_text() == "stop\nstop\n", "a second request of the user")
    (tmp_path / "go-on").touch()
    assert job.wait(timeout=60) == 0
