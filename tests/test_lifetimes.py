"""Nothing of a job outlives whoever of it is killed with SIGKILL, who cannot clean up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest

from backends.capabilities import TORCH_SIGNS
from contract.patience import stretched
from launch.guardian import guarded
from launch.job import Job
from launch.supervisor import run_job
from tests.launching import (
    LOCKSTEP,
    OF_EACH_STARTER,
    ending_processes_with,
    processes_with,
    require_backend,
    require_start_method,
    wait_for_steps,
    wait_until,
)
from tests.sparing import in_ci
from watch import shared_memory
from watch.rank_files import RankFiles

pytestmark = pytest.mark.slow

# How soon everything must be gone, on a machine that does nothing else.
SECONDS = 10.0
VICTIMS = ("launcher", "agent", "rank")
OWN_LAUNCHERS = {"ddp": "fork", "accelerate": "accelerate launch", "horovod": "horovodrun"}
OTHERS = [("ddp", "torchrun"), ("ddp", "spawn"), ("horovod", "mpirun"), ("horovod", "horovod-node")]
KILLS = [
    # Accelerate's launcher and ranks end as torchrun's and ddp's do; a killed rank of each is one of C43's cases, too.
    *in_ci(
        [*product(("ddp",), [""], VICTIMS), *product(("horovod",), [""], VICTIMS[:2]), ("accelerate", "", "agent")],
        list(product(OF_EACH_STARTER, [""], VICTIMS)),
    ),
    *in_ci(
        [("ddp", "torchrun", "launcher"), ("horovod", "mpirun", "launcher")],
        [(*other, victim) for other in OTHERS for victim in VICTIMS],
    ),
    ("single", "python", "launcher"),
]


def wait_until_gone(mark: str | Path) -> None:
    deadline = time.monotonic() + stretched(SECONDS)
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _start(backend: str, method: str, run: Path) -> subprocess.Popen[str]:
    """Starts a job with data loaders, and returns as soon as they are about to start."""
    options = ["--task", "token-tagging", "--max-steps", "1000000", "--save-every", "never"]
    # Long epochs: at the end of each, new workers are started.
    options += ["--num-train-samples", "2000", "--dataloader-num-workers", "1", "--output-dir", str(run)]
    options += ["--start-method", method] if method else []
    # Its processes can be told by their environment, also those that do not have the run on their command line.
    environment = {**os.environ, "TEST_RUN": str(run)}
    job = subprocess.Popen([str(LOCKSTEP), backend, *options], env=environment, stderr=subprocess.PIPE, text=True)
    num_ranks = 1 if backend == "single" else 2
    wait_until(lambda: _num_forkservers(run) >= num_ranks, "starts of workers", job=job, seconds=120)
    return job


def _num_forkservers(run: Path) -> int:
    return sum("multiprocessing.forkserver" in line for line in processes_with(run).values())


def _agent(launcher: psutil.Process) -> psutil.Process:
    (agent,) = [child for child in launcher.children() if "guardian.py" not in " ".join(child.cmdline())]
    return agent


@pytest.mark.parametrize(("backend", "method", "victim"), KILLS)
def test_nothing_outlives_whoever_is_killed(tmp_path: Path, backend: str, method: str, victim: str) -> None:
    """Under every start method: launcher, agent, and one of the ranks; a single one has only a launcher."""
    require_backend(backend)
    require_start_method(method)
    run = tmp_path / "run"
    with ending_processes_with(run):
        job = _start(backend, method, run)
        if victim == "launcher":
            wait_for_steps(run, job=job, seconds=120)  # its workers are at work
            job.kill()
        elif victim == "agent":
            _agent(psutil.Process(job.pid)).kill()
        else:
            pid = RankFiles(run, 1).running_pid()
            assert pid is not None
            psutil.Process(pid).kill()
        wait_until_gone(run)
    _, message = job.communicate(timeout=stretched(20))
    if victim == "agent":
        name = method or OWN_LAUNCHERS[backend]
        assert message.startswith(f"lockstep: {backend} failed: the starter ({name}) was killed (SIGKILL)\n")
    elif victim == "rank":
        assert f"lockstep: {backend} failed: rank 1 (" in message
        assert "ended without a message" in message


GUARDED = """
import subprocess, sys, time
from watch import shared_memory
from launch.guardian import guarded, scratch_directory
with guarded() as mark, scratch_directory("scratch-") as scratch:
    (scratch / "file").touch()
    processes = [subprocess.Popen(["sleep", sys.argv[1]], env=mark, start_new_session=True) for _ in range(3)]
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_guardian_holds_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    """Two beside each other: one ends well, one is killed. Whoever reads their output need not wait for a guardian."""
    command = [sys.executable, "-c", GUARDED]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TMPDIR": str(tmp_path)}
    with guarded() as mark:
        mine = subprocess.Popen(["sleep", "600"], env=mark)
        jobs = [
            subprocess.Popen([*command, "598.25", seconds], env=environment, stdout=subprocess.PIPE, text=True)
            for seconds in ("0", "600")
        ]
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
        jobs[0].communicate(timeout=stretched(20))
        # The other's three, and itself: a process has its command line a moment after its parent goes on.
        wait_until(lambda: len(processes_with("598.25")) == 4, "the processes of the other", seconds=stretched(20))
        jobs[1].kill()
        jobs[1].communicate(timeout=stretched(5))
        wait_until_gone("598.25")
        wait_until(lambda: not [*tmp_path.iterdir()], "no temporary file to be left", seconds=stretched(20))
        assert mine.poll() is None
    assert mine.wait(timeout=stretched(5)) == -9
    wait_until_gone("guardian.py " + str(os.getpid()))


def _failure_of(run: Path, *scripts: str, num_processes: int) -> str:
    """How a job fails whose starter is the first script, with the others and the run's directory as arguments."""
    (run / "logs").mkdir()
    job = Job(
        command=[sys.executable, "-c", *scripts, str(run)],
        environment=os.environ,
        run_directory=run,
        num_processes=num_processes,
        launcher=None,
        signs=TORCH_SIGNS,
    )
    failure = run_job(job, on_poll=lambda: None)
    assert failure is not None
    return str(failure)


def test_a_rank_that_crashes_says_how(tmp_path: Path) -> None:
    """A page of shared memory that the system cannot provide is a SIGBUS: the full /dev/shm is named."""
    script = (
        "import os, signal, sys; from pathlib import Path; from watch.rank_files import reporting\n"
        "with reporting(Path(sys.argv[1]), None): os.kill(os.getpid(), signal.SIGBUS)\n"
    )
    failure = _failure_of(tmp_path, script, num_processes=1)
    assert failure.startswith("rank 0: crashed (Bus error); /dev/shm has ")


def test_a_rank_that_we_end_is_not_the_one_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ignores SIGTERM and is killed in the end; rank 1 has died before."""
    monkeypatch.setattr("launch.supervisor._SECONDS_TO_END", 0.5)
    monkeypatch.setattr("launch.supervisor._SECONDS_TO_TERMINATE", 0.5)
    rank = (
        "import os, signal, sys, time; from pathlib import Path; from watch.rank_files import reporting\n"
        "with reporting(Path(sys.argv[1]), 'RANK') as rank:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(600 if rank == 0 else 1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    starter = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-c', *sys.argv[1:]]\n"
        "ranks = [subprocess.Popen(command, env={**os.environ, 'RANK': str(rank)}) for rank in range(2)]\n"
        "for rank in ranks: rank.wait()\n"
    )
    failure = _failure_of(tmp_path, starter, rank, num_processes=2)
    assert failure.startswith("rank 1: ended without a message")


def test_a_rank_that_fails_first_finishes_what_it_writes(tmp_path: Path) -> None:
    """Its starter asks it to end as soon as another rank has ended, while a thread still writes a checkpoint."""
    (tmp_path / "logs").mkdir()
    script = (
        "import sys, threading, time; from pathlib import Path; from watch.rank_files import reporting\n"
        "place = Path(sys.argv[1])\n"
        "def write(): time.sleep(1); (place / 'checkpoint').touch()\n"
        "with reporting(place, None):\n"
        "    threading.Thread(target=write).start()\n"
        "    raise ArithmeticError('no number')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    rank = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    wait_until((tmp_path / "logs" / "rank0.error.json").exists, "the error of the rank")
    rank.terminate()
    assert rank.wait(timeout=stretched(20)) == 1
    assert (tmp_path / "checkpoint").exists()


def _with_little_shared_memory(size: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line in a private mount namespace, with so much shared memory; only root can."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    full = ["unshare", "--mount", "sh", "-c", script, "sh", str(LOCKSTEP), *command]
    return subprocess.run(full, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("16k", ("ddp", "--dataloader-num-workers", "1")),  # semaphores
        ("1m", ("ddp", "--dataloader-num-workers", "1", "--task", "tests.faulty:BulkyTask")),
        ("4k", ("ddp", "--transport", "shared-memory")),
        ("4k", ("horovod",)),
        ("64k", ("horovod", "--start-method", "mpirun")),
    ],
    ids=["semaphores", "task", "gradients", "horovodrun", "mpirun"],
)
def test_full_shared_memory_is_named(tmp_path: Path, size: str, options: tuple[str, ...]) -> None:
    require_backend(options[0])
    require_start_method(options[-1])
    run = ("--task", "token-tagging", "--max-steps", "3", "--output-dir", str(tmp_path / "run"))
    done = _with_little_shared_memory(size, options[0], *run, *options[1:])
    assert done.returncode == 1, done.stdout
    first, second = done.stderr.splitlines()
    assert "; /dev/shm has " in first
    assert "--shm-size" in first
    assert second.startswith("  more in ")


@pytest.mark.parametrize(
    ("message", "free", "advised"),
    [
        ("out of resource: shared memory, Required: 147456, Hardware limit: 101376", 1, False),
        ("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)", 10**4, False),
        ("unable to allocate shared memory(shm) for file </torch_1>", 10**4, True),
        ("DataLoader worker (pid 1) is killed by signal: Bus error.", 10**4, True),
        ("OSError: [Errno 28] No space left on device", 64, True),
        ("OSError: [Errno 28] No space left on device: '/runs/a/checkpoints/.step-1'", 64, False),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_1'", 64, True),
        ("SaveFailed: the checkpoint of step 4 could not be written: No space left on device", 64, False),
    ],
)
def test_other_troubles_are_not_blamed_on_shared_memory(
    monkeypatch: pytest.MonkeyPatch, message: str, free: int, advised: bool
) -> None:
    size = shutil.disk_usage("/")._replace(free=free * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: size)
    assert bool(shared_memory.advice(message, "", ended_silently=False)) == advised


@pytest.mark.parametrize(("free", "advised"), [(64, False), (1, True)])
def test_silence_beside_a_full_shared_memory_may_come_from_it(
    monkeypatch: pytest.MonkeyPatch, free: int, advised: bool
) -> None:
    size = shutil.disk_usage("/")._replace(free=free * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: size)
    assert bool(shared_memory.advice("killed", "", ended_silently=True)) == advised
    assert not shared_memory.advice("killed", "", ended_silently=False)
