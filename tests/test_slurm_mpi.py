"""Inside a job of SLURM, mpirun reaches the nodes by srun: on a real cluster whose nodes are all this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from compare.results import Results
from tests.forked.client import forked_lockstep
from tests.launching import starting, train
from tests.slurm_cluster import on_slurm

OPTIONS = ("--task", "token-tagging", "--threads-per-rank", "1")
MPI = ("--engine", "mpi", "--num-processes", "2")


def _in_job(place: Path, *lines: str) -> None:
    """Runs lines of a shell in a job of two nodes, whose names only SLURM knows."""
    script = "\n".join(["#!/bin/sh", "hosts=$(scontrol show hostnames | paste -sd ,)", *lines, ""])
    submit = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--time=10", f"--output={place / 'log'}"]
    done = subprocess.run(submit, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (place / "log").read_text()


def _line(*words: str | Path) -> str:
    return f'{shlex.join([*forked_lockstep(), *map(str, words)])} --hosts "$hosts"'


@on_slurm
def test_jobs_of_mpirun_share_the_nodes(tmp_path: Path) -> None:
    """One waits, in the middle of its training, for the end of another."""
    go_on, steps = tmp_path / "go-on", ("--max-steps", "8", "--logging-steps", "1")
    first = (*MPI, *steps, "--threads-per-rank", "1", "--master-port", "20001", "--output-dir", tmp_path / "first")
    second = (*MPI, *steps, *OPTIONS, "--master-port", "20002", "--output-dir", tmp_path / "second")
    _in_job(
        tmp_path,
        f"{_line('ddp', *first, '--task', 'tests.faulty:HeldTask', '--until', go_on)} &",
        f"until [ -e {tmp_path}/first/node0/progress.jsonl ] || ! kill -0 $!; do sleep 0.1; done",
        f"{_line('ddp', *second)} || exit",
        f"touch {go_on}",
        "wait $!",
    )
    with starting("forked"):
        alone = train("ddp", tmp_path / "alone", *OPTIONS, *steps, "--num-processes", "2")
    of_first, of_second = (
        json.loads((tmp_path / run / "node0" / "record.json").read_text()) for run in ("first", "second")
    )
    assert of_first["status"] == "completed"
    assert [rank["weights_sha256"] for rank in of_second["ranks"]] == [
        rank["weights_sha256"] for rank in alone["ranks"]
    ]


@on_slurm
@pytest.mark.exhaustive  # the race between hosts of test_mpi
def test_a_race_takes_place_inside_a_job(tmp_path: Path) -> None:
    race = ("compare", "--engine", "mpi", "--backends", "ddp", *OPTIONS, "--num-processes", "2")
    sizes = ("--repeats", "3", "--timed-steps", "20", "--diagnosis-steps", "10")
    less = ("--no-limits", "--no-collectives", "--no-wait-for-idle", "--output-dir", tmp_path / "race")
    _in_job(tmp_path, _line(*race, *sizes, *less, "--entrant", "coarse=ddp:--bucket-cap-mb 50"))
    results = Results.model_validate_json((tmp_path / "race" / "results.json").read_text())
    (group,) = results.groups
    assert "(2 nodes)" in group.group.key
    assert {one.name: one.num_runs for one in group.entrants} == {"ddp": 3, "ddp (coarse)": 3}
    assert all(one.parity.verdict in ("bitwise", "rounding") for one in group.entrants)
