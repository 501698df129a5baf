"""What safety costs: python -m tests.faults.costs [--repeats 3] writes docs/results/costs.json.

The embedded job, saved every 50 steps. What a checkpoint costs is the time of the ten steps after it,
in which it is copied and written, less that of ten steps half-way to the next one: pairs a second
apart, which share whatever else the machine is doing. To be run on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from records.config import RunOptions
from records.environment import describe_environment
from records.record import RunRecord, read_record
from tests.launching import train
from watch.heartbeat import Heartbeat

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "costs.json"
INTERVAL, WINDOW = 50, 10
# A sign of life for each of: data, forward, backward, update.
SIGNS_OF_A_STEP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    environment = describe_environment(with_torch=False)
    extra: list[float] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="costs-") as name:
        for repeat in range(options.repeats):
            run = Path(name) / str(repeat)
            train("ddp", run, "--save-every", str(INTERVAL))
            record = read_record(run / "record.json")
            extra += _extra_seconds(record)
            steps += [fmean(rank.step_seconds[5:]) for rank in record.ranks]
        checkpoint = next(Path(name).glob("*/checkpoints/*")).stat().st_size
    mean = float(np.mean(extra))
    low, high = stats.t.interval(0.95, len(extra) - 1, loc=mean, scale=stats.sem(extra))
    default = int(RunOptions.model_fields["save_every"].default)
    figures: dict[str, Any] = {
        "command": f"python -m tests.faults.costs --repeats {options.repeats}",
        "cpu": environment.cpu,
        "num_cpus": environment.num_cpus,
        "git_commit": environment.git_commit,
        "checkpoint_bytes": checkpoint,
        "step_seconds": fmean(steps),
        "num_checkpoints": len(extra),
        "seconds_of_a_checkpoint": {"mean": mean, "low": float(low), "high": float(high)},
        "default_interval": default,
        "share_at_default": {
            "mean": mean / (default * fmean(steps)),
            "high": float(high) / (default * fmean(steps)),
        },
        "sign_of_life_seconds": _sign_of_life(),
    }
    options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def _extra_seconds(record: RunRecord) -> list[float]:
    """For each checkpoint within an epoch, what the slower rank's steps after it took longer than others."""
    ends = {evaluation.step for evaluation in record.evaluations}
    found = []
    for step in range(INTERVAL, len(record.steps) - INTERVAL + 1, INTERVAL):
        if step in ends:  # saved between two epochs, which no step's time covers
            continue
        differences = []
        for rank in record.ranks:
            # Entry i is of step i + 1.
            after = sum(rank.step_seconds[step : step + WINDOW])
            control = sum(rank.step_seconds[step + INTERVAL // 2 : step + INTERVAL // 2 + WINDOW])
            differences.append(after - control)
        found.append(max(differences))
    return found


def _sign_of_life() -> float:
    heartbeat = Heartbeat()
    phases = ("data", "forward", "backward", "update")
    began = time.perf_counter()
    for step in range(100_000):
        for phase in phases:
            heartbeat.enter(phase, step)
    return (time.perf_counter() - began) / (100_000 * len(phases))


if __name__ == "__main__":
    main()
