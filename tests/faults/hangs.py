"""Makes a rank hang in each way on each backend: the job must end soon, naming it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.launching import lockstep, processes_of

# How a rank hangs, and what the message must say of it.
HANGS = {
    "is-stopped": "the process is stopped (SIGSTOP)",
    "loops": "it is not waiting for another rank",
    "waits-alone": "but not in the same collective",
}


@dataclass(frozen=True)
class Hang:
    """What became of one job; `seconds` from the fault to the end of the whole job."""

    backend: str
    fault: str
    seconds: float
    problems: list[str]


def hang_one(backend: str, fault: str, run: Path, *options: str) -> Hang:
    """Runs a job whose rank 1 hangs over its fifth batch."""
    done = lockstep(backend, "--task", "tests.faulty:HangingTask", "--fault", fault, *options, "--output-dir", run)
    ended_at = time.time()
    log = (run / "logs" / "rank1.log").read_text()
    noted = re.search(r"fault at ([\d.]+)", log)
    seconds = ended_at - float(noted[1]) if noted else float("nan")
    problems = []
    if done.returncode != 1:
        problems.append(f"exit code {done.returncode}")
    if not re.match(rf"lockstep: {backend} failed: rank 1 \(\S+, step 5, data\): hangs: ", done.stderr):
        problems.append(f"the message: {done.stderr}")
    if HANGS[fault] not in done.stderr:
        problems.append(f"the reason: {done.stderr}")
    if len(done.stderr.splitlines()) != 2:
        problems.append(f"more than the two lines: {done.stderr}")
    stacks = {rank: (run / "logs" / f"rank{rank}.stacks").read_text() for rank in (0, 1)}
    if "collate" not in stacks[1] or "train_step" not in stacks[0]:
        problems.append("stacks are missing")
    if processes_of(run):
        problems.append("processes are left")
    return Hang(backend, fault, seconds, problems)
