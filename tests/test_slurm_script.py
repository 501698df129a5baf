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
from engines.following import Followed
from engines.slurm import environment_for_sbatch
from engines.slurm_job import SlurmJob
from launch.signals import Interrupted
from tests.launching import LOCKSTEP, lockstep, wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]

# It says how it is started, and counts how often it is told to stop until it is told otherwise.
_SRUN = """#!/bin/bash
there=$(dirname "$job")
echo "${@: -1}" >"$there/started"
echo "$* ${SLURM_CPU_BIND_TYPE:-}" >"$there/asked"
count() { echo stop >>"$there/stops"; }
trap count TERM
echo $$ >"$job.node0.pid"
until [[ -e $there/go-on ]] || ((SECONDS > 60)); do sleep 0.05; done
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
            "SLURM_CPU_BIND_TYPE": "mask_cpu:",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
        return subprocess.Popen(["bash", "-c", engine.script()], env=variables)

    return start


def test_a_requeued_job_continues_what_it_has_saved_itself(tmp_path: Path, script: Start) -> None:
    (tmp_path / "go-on").touch()
    (tmp_path / "job7.code").write_text("75\n")

    def started(*options: str) -> str:
        assert script(1, *options).wait(timeout=60) == 0
        return (tmp_path / "started").read_text().strip()

    assert started() == "--resume=latest"
    assert started("--overwrite") == "--overwrite"
    (tmp_path / "job7.begun").touch()
    os.utime(tmp_path / "job7.begun", (0, 0))
    assert started("--overwrite") == "--resume=latest"
    assert [path.name for path in tmp_path.glob("job*")] == ["job7.code"]
    assert (tmp_path / "job7.code").read_text() == "0\n"


def test_the_end_of_the_time_stops_no_job_that_stops_already(tmp_path: Path, script: Start) -> None:
    job, stops = script(0), tmp_path / "stops"
    wait_until((tmp_path / "job7.node0.pid").exists, "the job")
    job.send_signal(signal.SIGTERM)
    wait_until(stops.exists, "a request to stop")
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.3)  # in which it would have been passed on
    assert stops.read_text() == "stop\n"
    job.send_signal(signal.SIGTERM)
    wait_until(lambda: stops.read_text() == "stop\nstop\n", "a second request of the user")
    (tmp_path / "go-on").touch()
    assert job.wait(timeout=60) == 0


def test_steps_depend_neither_on_an_option_for_the_job_nor_on_an_allocation_around_it(
    tmp_path: Path, script: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "go-on").touch()
    assert script(0).wait(timeout=60) == 0
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("--export=ALL ")
    assert "mask_cpu" not in asked
    for name in ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    passed_on = [name for name in environment_for_sbatch() if name.startswith(("SLURM_", "SBATCH_"))]
    assert passed_on == ["SLURM_CONF"]


def test_what_another_job_has_left_stays_its_own(tmp_path: Path, script: Start) -> None:
    (tmp_path / "go-on").touch()
    (tmp_path / "job6.node0.pid").write_text("1\n")
    assert script(0).wait(timeout=60) == 0
    assert (tmp_path / "job6.node0.pid").exists()


# As scontrol answers for a job that ended minutes ago.
_FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def _with_programs(there: Path, **lines: str) -> dict[str, str]:
    """Variables by which commands find these programs first; each is a line of a shell."""
    there.mkdir()
    for name, line in lines.items():
        (there / name).write_text(f"#!/bin/sh\n{line}\n")
        (there / name).chmod(0o755)
    return {"PATH": f"{there}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("left", "code"), [("0", 0), ("75", 75), ("3", 3), (None, 1)])
def test_a_job_that_slurm_has_forgotten(tmp_path: Path, left: str | None, code: int) -> None:
    """A command that could not ask for minutes finds what the script of the job has left, and removes its files.

    If the job is put back into the queue, its script needs to know when it began.
    """
    run = tmp_path / "run"
    # A script that was killed leaves more than its code; the file of job 70 is another's.
    leave = f"touch {run}/job7.begun {run}/job7.node1.pid {run}/job70.node1.pid; "
    leave += "" if left is None else f"echo {left} >{run}/job7.code; "
    env = _with_programs(tmp_path / "bin", sbatch=f"{leave}echo 7", scontrol=_FORGOTTEN)
    done = lockstep("ddp", "--engine", "slurm", "--num-nodes", "2", "--output-dir", run, env=env)
    assert done.returncode == code, done.stderr
    assert ("is no longer known to SLURM" in done.stderr) == (left is None)
    assert ("job 7 failed with exit code 3" in done.stderr) == (left == "3")
    assert sorted(path.name for path in run.glob("job[0-9]*")) == ["job7.begun", "job70.node1.pid"]


def test_a_job_that_may_go_on_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script finds by them whom to tell to stop."""

    def no_answer(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "no answer")

    monkeypatch.setattr("engines.slurm_job._slurm", no_answer)
    (tmp_path / "job7.node0.pid").touch()
    job = SlurmJob("7", Followed([]), tmp_path / "job.log")
    with pytest.raises(Interrupted):
        job.to_the_end([signal.SIGTERM])
    assert (tmp_path / "job7.node0.pid").exists()


@pytest.mark.parametrize(
    ("output", "errors"),
    [("a closed pipe", ""), ("/dev/full", "lockstep: the output cannot be written (No space left on device)\n")],
)
def test_a_job_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path, output: str, errors: str) -> None:
    """As after `| head`: neither the line of the command nor those of node 0 can be written."""
    run = tmp_path / "run"
    log = f"printf 'step 1\\nlockstep: step 2: saved\\n' >{run}/node0.log"
    env = _with_programs(tmp_path / "bin", sbatch=f"{log}; echo 0 >{run}/job7.code; echo 7", scontrol=_FORGOTTEN)
    command = [str(LOCKSTEP), "ddp", "--engine", "slurm", "--num-nodes", "2", "--output-dir", str(run)]
    if output == "/dev/full":
        place = os.open(output, os.O_WRONLY)
    else:
        reader, place = os.pipe()
        os.close(reader)
    try:
        done = subprocess.run(
            command, stdout=place, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}, timeout=180
        )
    finally:
        os.close(place)
    assert (done.returncode, done.stderr) == (0, f"{errors}lockstep: step 2: saved\n")
