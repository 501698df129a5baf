"""Cases that are whole jobs: started from the command line, as a user starts them, and observed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.registry import find_backend
from contract.case import Case, global_batch_size
from contract.patience import stretched
from launch.guardian import guarded
from launch.starters.environment import starter_environment
from launch.starters.interface import PROJECT_DIRECTORY, Ranks
from launch.starters.python import Python
from records.config import STARTED_AT_VARIABLE
from records.names import RECORD_NAME

# The command line of this installation.
LOCKSTEP = (str(Path(sysconfig.get_path("scripts")) / "lockstep"),)
# For a whole job on an idle machine, the start of its ranks included. The end after a fault has a limit of its own.
JOB_SECONDS = 75.0
REFUSAL_SECONDS = 25.0
# The timeout of collectives in a job with a fault.
FAULT_TIMEOUT = 10.0
# Marks the processes of a job, so that those left behind are found by the environment that they were started with.
# Nothing simpler finds a process that has left its group and its parent; the launcher's own mark is of no use here,
# since the launcher itself ends every process that still carries it.
MARK_VARIABLE = "LOCKSTEP_CONTRACT_RUN"
# Ours are among the names that a file in the working directory may have by chance.
_OWN_PACKAGES = ("launch", "tasks", "backends", "records", "watch", "training")
_IMPOSTORS = ("torch", "numpy", "horovod", "accelerate", "transformers", "datasets", *_OWN_PACKAGES)


def refusals(
    adapter: str, own: Sequence[str], world_size: int, case: Case, directory: Path, device: str
) -> list[dict[str, Any]]:
    """Makes requests that the adapter does not declare, and returns its answers."""
    answers = directory / "answers.jsonl"
    answers.touch()
    ranks = Ranks(1, (), "cpu", 1, None, 15.0, directory)
    command = [sys.executable, "-m", "contract.refusals", adapter, str(answers), *own]
    with contextlib.suppress(subprocess.TimeoutExpired), guarded() as mark:
        subprocess.run(
            command,
            env=starter_environment(Python(), ranks) | mark,
            cwd=PROJECT_DIRECTORY,
            timeout=stretched(REFUSAL_SECONDS),
            capture_output=True,
            check=False,
        )
    seen = [json.loads(line) for line in answers.read_text().splitlines()]
    row = find_backend(adapter)
    limit = row.capabilities.max_world_size
    if limit is not None:
        done = _run(adapter, directory, *own, "--num-processes", limit + 1, "--output-dir", directory / "run")
        is_clear = done.returncode == 2 and not (directory / "run").exists()
        answer = {"asked": {"num_processes": limit + 1}, "names": str(limit + 1), "error": done.stderr, "type": ""}
        seen.append({**answer, "clear": is_clear})
    return [{"answers": seen}]


def fault(
    adapter: str, own: Sequence[str], world_size: int, case: Case, directory: Path, device: str
) -> list[dict[str, Any]]:
    """Runs a job whose last rank fails in the way that the case is named after, and returns how the job ended."""
    rank, kind = world_size - 1, case.name.removeprefix("rank-")
    run = directory / "run"
    # Without the launcher's watchdog: the library itself must give up.
    timeout = round(stretched(FAULT_TIMEOUT))
    patience = ("--timeout", timeout, "--hang-timeout", "0")
    task = ("--task", "contract.awkward_tasks:FaultyTask", "--fault", kind, "--faulty-rank", rank)
    dtype = () if find_backend(adapter).capabilities.float64 else ("--dtype", "float32")
    options = (*own, *task, *dtype, "--max-steps", "50", *patience, *_world(world_size, device))
    began_at = time.time()
    done = _run(adapter, directory, *options, "--output-dir", run, **{MARK_VARIABLE: str(run)})
    ended_at = time.time()
    log = run / "logs" / f"rank{rank}.log"
    noted = re.search(r"fault at ([\d.]+)", log.read_text()) if log.exists() else None
    record = run / RECORD_NAME
    return [
        {
            "faulty_rank": rank,
            "return_code": done.returncode,
            "message": done.stderr.strip(),
            "timeout": timeout,
            "seconds_to_fault": float(noted[1]) - began_at if noted else None,
            "seconds": ended_at - float(noted[1]) if noted else None,
            "left": _processes_of(str(run)),
            "status": json.loads(record.read_text())["status"] if record.exists() else None,
        }
    ]


def hostile(
    adapter: str, own: Sequence[str], world_size: int, case: Case, directory: Path, device: str
) -> list[dict[str, Any]]:
    """Runs the same job twice: first with everything that libraries are known to obey by mistake, then without it."""
    # In float32: autocast does not touch float64, so that a wrong precision would not be noticed.
    task = ("--task", "token-tagging", "--max-steps", 4, "--dtype", "float32")
    patience = ("--timeout", round(stretched(20.0)))
    options = (*own, *task, *patience, "--threads-per-rank", 1, *_world(world_size, device))
    home, working = directory / "home", directory / "working"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text("mixed_precision: bf16\nnum_processes: 7\n")
    working.mkdir()
    for name in _IMPOSTORS:
        (working / f"{name}.py").write_text("raise ImportError('this is not the library')\n")
    variables = {
        "HF_HOME": str(home),
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        "LT_PRECISION": "bf16-mixed",
        "DS_ACCELERATOR": "npu",
        "PYTHONWARNINGS": "error",
        "OMP_NUM_THREADS": "7",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "5",
        "MASTER_ADDR": "nowhere.invalid",
        "MASTER_PORT": "1",
    }
    with socket.socket() as listener:
        # The default port of launchers; if another process uses it already, that serves the purpose, too.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        disturbed = _run(adapter, working, *options, "--output-dir", directory / "hostile", **variables)
    if disturbed.returncode == 124:  # the job hung, and would take as long again
        undisturbed = disturbed
    else:
        undisturbed = _run(adapter, directory, *options, "--output-dir", directory / "peaceful")
    return [
        {
            "peaceful": _record(directory / "peaceful", undisturbed),
            "hostile": _record(directory / "hostile", disturbed),
        }
    ]


def _world(world_size: int, device: str) -> tuple[Any, ...]:
    batch = ("--global-batch-size", global_batch_size(world_size), "--micro-batch-size", 4)
    return ("--num-processes", world_size, "--device", device, *batch)


def _run(adapter: str, working_directory: Path, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line to its end, or ends it when it takes too long."""
    command = [*LOCKSTEP, adapter, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != STARTED_AT_VARIABLE} | variables
    if "PYTHONPATH" in environment:
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths if path)
    limit = stretched(JOB_SECONDS)
    with guarded() as mark:
        job = subprocess.Popen(
            command,
            cwd=working_directory,
            env=environment | mark,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, stderr = job.communicate(timeout=limit)
            return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"the job has not ended within {limit:.0f} s")
        finally:
            # SIGTERM first: on that, the launcher ends its ranks, however they handle signals.
            if job.poll() is None:
                job.terminate()
                try:
                    job.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.communicate()


def _record(directory: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    path = directory / RECORD_NAME
    if done.returncode or not path.exists():
        return {"error": done.stderr.strip() or f"exit code {done.returncode}"}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _processes_of(run: str) -> list[int]:
    """Returns the processes that have the run on their command line or in the environment they were started with."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if run.encode() in (path / name).read_bytes():
                    found.add(int(path.name))
    return sorted(found)
