"""A rank that sleeps while it waits for Horovod: the same bits, little processor time, hangs are named as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.hangs import hang_one
from tests.launching import lockstep, require_backend, train

ASLEEP = ("--wait", "sleep")


@pytest.fixture(autouse=True)
def horovod() -> None:
    require_backend("horovod")


def _waiting(run: Path, *options: str) -> dict[str, Any]:
    """The record of a training in which rank 0 waits half a second in each step for rank 1."""
    slow = ("--task", "tests.faulty:SlowTask", "--slow-rank", "1", "--seconds", "0.5")
    return train("horovod", run, *slow, "--num-processes", "2", "--max-steps", "4", "--no-evaluate", *options)


def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path: Path) -> None:
    spinning, sleeping = _waiting(tmp_path / "spin"), _waiting(tmp_path / "sleep", *ASLEEP)
    seconds = [sum(record["ranks"][0]["step_cpu_seconds"]) for record in (spinning, sleeping)]
    assert seconds[1] < seconds[0] / 2
    assert [record["ranks"][0]["effective_settings"]["wait"] for record in (spinning, sleeping)] == ["spin", "sleep"]
    weights = {rank["weights_sha256"] for record in (spinning, sleeping) for rank in record["ranks"]}
    assert len(weights) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["loops", "waits-alone"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, fault: str) -> None:
    assert hang_one("horovod", fault, tmp_path / "run", "--hang-timeout", "5", *ASLEEP).problems == []


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    """Gradients, weights, bits, traffic, overflow, and unused parameters."""
    clauses = ("--num-processes", "2,3", "--check", "C09,C16,C17,C24,C25,C26,C27,C30,C37")
    done = lockstep("contract", "horovod", *ASLEEP, *clauses)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "horovod --wait sleep on cpu: 9 passed" in done.stdout


def test_other_words_are_refused(tmp_path: Path) -> None:
    done = lockstep("horovod", "--wait", "nap", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--wait nap" in done.stderr
    assert not (tmp_path / "run").exists()
