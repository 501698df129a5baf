"""Kills a random rank of a job at a random moment: the job must end complete, as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from records.checkpoint import checkpoint_step, list_checkpoints
from tests.forked.client import ForkedJob
from tests.launching import lockstep, processes_of, start_lockstep, starting
from watch.rank_files import started_ranks

# About two seconds of training, ten checkpoints, dropout on.
JOB = (
    *("--task", "tests.faulty:SlowTask", "--seconds", "0.05", "--dtype", "float32", "--dropout", "0.1"),
    *("--max-steps", "30", "--save-every", "3", "--num-processes", "2", "--max-restarts", "3", "--timeout", "60"),
)
NUM_STEPS = 30


@dataclass(frozen=True)
class Kill:
    """What became of one job.

    Attributes:
        rank: The one that was killed.
        position: Where it was.
        saved_before: The newest checkpoint that was whole just before; 0: none.
        resumed_at: The step after which the job went on; 0: from its beginning.
        seconds_to_resume: From the kill to the first step of the next start.
        problems: In what the job differs from the unbroken one.
    """

    backend: str
    rank: int
    position: str
    saved_before: int
    resumed_at: int | None
    seconds_to_resume: float | None
    problems: list[str]


def unbroken(backend: str, directory: Path) -> Path:
    """Runs the job that nobody kills."""
    run = directory / f"unbroken-{backend}"
    done = lockstep(backend, *JOB, "--output-dir", run)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return run


def kill_one(backend: str, run: Path, whole: Path, draw: random.Random) -> Kill | None:
    """Starts the job and kills a rank; None if the job was over before the moment came."""
    job = start_lockstep(backend, *JOB, "--output-dir", run)
    rank = draw.randrange(2)
    pid = _wait_for(run, rank)
    # New processes need about as long to start as to train; forked ones begin at once.
    time.sleep(draw.uniform(0, 3 if isinstance(job, ForkedJob) else 7))
    files = next(files for files in started_ranks(run) if files.rank == rank)
    if files.succeeded() or files.running_pid() != pid:
        job.communicate(timeout=120)
        return None
    saved = [checkpoint_step(path) for path in list_checkpoints(run)]
    killed_at = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    has_succeeded = files.succeeded()  # in the moment before
    position = str(files.position() or "start")
    _, errors = job.communicate(timeout=120)
    if has_succeeded or "the training had ended before, and rank 0 saved the model and the record" in errors:
        return None
    record = _read(run)
    resumed = record.get("resumed_from") or {}
    resumed_at = resumed.get("step", 0) if record else None
    first_step_at = _first_step(run)
    kill = Kill(
        backend=backend,
        rank=rank,
        position=position,
        saved_before=max(saved, default=0),
        resumed_at=resumed_at,
        seconds_to_resume=first_step_at - killed_at if first_step_at else None,
        problems=list(_problems(job.returncode, errors, run, whole, max(saved, default=0), rank)),
    )
    return kill


def _problems(code: int, errors: str, run: Path, whole: Path, saved: int, rank: int) -> Iterator[str]:
    record, expected = _read(run), _read(whole)
    if code != 0 or not record:
        yield f"exit code {code}: {errors[-500:]}"
        return
    if f"rank {rank} (" not in errors:
        yield f"the rank is not named: {errors[-500:]}"
    if record["restarts"] != 1:
        yield f"{record['restarts']} restarts"
    if (record["resumed_from"] or {"step": 0})["step"] < saved:
        yield f"went on from {record['resumed_from']}, though step {saved} was saved"
    if [one["step"] for one in record["steps"]] != list(range(1, NUM_STEPS + 1)):
        yield "steps are missing"
    if record["steps"] != expected["steps"]:
        yield "steps differ"
    if {one["weights_sha256"] for one in record["ranks"]} != {expected["ranks"][0]["weights_sha256"]}:
        yield "final weights differ"
    if (run / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes():
        yield "the saved model differs"
    if processes_of(run):
        yield "processes are left"


def campaign(
    backends: Sequence[str], num_kills: int, directory: Path, seed: int, tell: Any = lambda kill: None
) -> list[Kill]:
    """Kills ranks of jobs of all backends in turn until so many have been killed.

    In a test session one job of each backend is started by its own launcher, and the others are forked.
    """
    draw = random.Random(seed)
    whole = {backend: unbroken(backend, directory) for backend in backends}
    kills: list[Kill] = []
    attempts = 0
    while len(kills) < num_kills:
        backend = backends[len(kills) % len(backends)]
        run = directory / f"{attempts}-{backend}"
        attempts += 1
        with starting("launchers" if len(kills) < len(backends) else "forked"):
            kill = kill_one(backend, run, whole[backend], draw)
        if kill is not None:
            kills.append(kill)
            tell(kill)
    return kills


def summary(kills: list[Kill]) -> dict[str, Any]:
    """The figures of a campaign."""
    waits = sorted(kill.seconds_to_resume for kill in kills if kill.seconds_to_resume is not None)
    return {
        "tried": len(kills),
        "survived": sum(not kill.problems for kill in kills),
        "by_backend": {
            backend: sum(kill.backend == backend and not kill.problems for kill in kills)
            for backend in sorted({kill.backend for kill in kills})
        },
        "in_phase": {
            phase: sum(kill.position.rpartition(", ")[2] == phase for kill in kills)
            for phase in sorted({kill.position.rpartition(", ")[2] for kill in kills})
        },
        "from_the_beginning": sum(kill.resumed_at == 0 for kill in kills),
        "median_seconds_to_resume": round(waits[len(waits) // 2], 1) if waits else None,
        "failures": [asdict(kill) for kill in kills if kill.problems],
    }


def _wait_for(run: Path, rank: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for files in started_ranks(run) if (run / "logs").exists() else []:
            pid = files.running_pid()
            if files.rank == rank and pid is not None and files.position() is not None:
                return pid
        time.sleep(0.01)
    sys.exit(f"rank {rank} of {run} did not start")


def _first_step(run: Path) -> float | None:
    """When the last start of a run took its first step."""
    events = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
    return next((float(event["time"]) for event in events if event["event"] in ("step", "closed")), None)


def _read(run: Path) -> dict[str, Any]:
    path = run / "record.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content
