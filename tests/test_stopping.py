"""A run that is asked to stop saves where it is, and goes on from there."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from contract.patience import stretched
from records.checkpoint import checkpoint_step, list_checkpoints
from tests.launching import (
    DISTRIBUTED,
    LOCKSTEP,
    ending,
    lockstep,
    require_backend,
    start_lockstep,
    wait_for_steps,
    wait_until,
)
from tests.resuming import UnbrokenRuns, assert_same_run
from training import stopping


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    return UnbrokenRuns(tmp_path_factory)


def test_ranks_stop_after_the_step_that_rank_0_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    (tmp_path / "logs").mkdir()
    first, second = (stopping.StopRequest(tmp_path, rank=rank, travels_with_loss=False) for rank in (0, 1))
    assert not first.is_agreed(4)
    stopping.request_stop(tmp_path)
    assert not second.is_agreed(5)
    assert not first.is_agreed(5), "rank 0 has just looked"
    assert not second.is_agreed(6), "nobody but rank 0 decides"
    now = 0.06
    assert not first.is_agreed(6), "another rank may have ended this step before"
    late = stopping.StopRequest(tmp_path, rank=2, travels_with_loss=False)
    for one in (first, second, late):
        assert not one.is_agreed(6)
        assert one.is_agreed(7)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=lambda number: number.name
)
@pytest.mark.parametrize("backend", ["single", *DISTRIBUTED])
def test_asked_to_stop_it_saves_and_goes_on(
    tmp_path: Path, unbroken: UnbrokenRuns, backend: str, number: signal.Signals
) -> None:
    require_backend(backend)
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:HeldTask", "--max-steps", "12", "--dropout", "0.1", "--keep", "100")
    # With two threads on busy cores, one of twelve runs of one process ended with other bits, none of twenty with one.
    options = (*options, "--threads-per-rank", "1")
    job = start_lockstep(backend, *options, "--until", run / "logs" / "stop", "--output-dir", run)
    wait_for_steps(run)
    job.send_signal(number)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 75, stderr
    (saved,) = list_checkpoints(run)
    step = checkpoint_step(saved)
    assert stderr.splitlines() == [
        f"lockstep: {number.name}: finishing this step and saving a checkpoint; "
        f"a second {number.name} stops the run at once",
        f"lockstep: stopped after step {step}; continue with --resume",
    ]
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "interrupted"
    assert [one["step"] for one in record["steps"]] == list(range(1, step + 1))
    done = lockstep(backend, "--task", options[1], "--until", "/", "--resume", "--output-dir", run)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {step}, from {saved}" in done.stdout
    assert sorted(path.name for path in (run / "attempts" / "1").iterdir()) == [
        "logs", "progress.jsonl", "record.json", "run.json"
    ]  # fmt: skip
    assert_same_run(run, unbroken(backend, *options), stopped_after=step)


@pytest.mark.slow
@pytest.mark.launchers
@pytest.mark.parametrize("save_every", ["500", "never"])
def test_asked_twice_it_ends_at_once(tmp_path: Path, save_every: str) -> None:
    """And the first time, where it is not to save anything."""
    run = tmp_path / "run"
    command = [str(LOCKSTEP), "ddp", "--task", "tests.faulty:SlowTask", "--seconds", "5", "--output-dir", str(run)]
    command += ["--save-every", save_every]
    with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as job:
        wait_for_steps(run, job=job)
        if save_every != "never":
            job.send_signal(signal.SIGTERM)
            wait_until((run / "logs" / "stop").exists, "a request to stop")
        job.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, stderr = job.communicate(timeout=180)
    assert time.monotonic() - began < stretched(12)
    assert job.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == "lockstep: interrupted by SIGTERM; all ranks have been ended"
    assert json.loads((run / "record.json").read_text())["status"] == "interrupted"
    assert not list_checkpoints(run)


@pytest.mark.slow
def test_the_record_of_a_run_stopped_twice_has_its_past(tmp_path: Path) -> None:
    run, last = tmp_path / "run", 0
    options = ("--task", "tests.faulty:SlowTask", "--max-steps", "60", "--output-dir", str(run))
    for more in ((), ("--resume",)):
        job = start_lockstep("ddp", *options, *more)
        if more:
            wait_until((run / "attempts" / "1" / "progress.jsonl").exists, "the start that goes on")
        wait_for_steps(run)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=180) == 75
        record = json.loads((run / "record.json").read_text())
        assert [one["step"] for one in record["steps"]] == list(range(1, len(record["steps"]) + 1))
        assert len(record["steps"]) > last
        assert (record["resumed_from"] or {"step": 0})["step"] == last
        last = len(record["steps"])


@pytest.mark.slow
def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """Ctrl-C ends the other end of a pipe, too; the run still saves."""
    run = tmp_path / "run"
    command = [str(LOCKSTEP), "ddp", "--task", "tests.faulty:SlowTask", "--max-steps", "60", "--output-dir", str(run)]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as job:
        wait_for_steps(run, job=job)
        assert job.stdout is not None
        job.stdout.close()
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=180) == 75
    assert list_checkpoints(run)
