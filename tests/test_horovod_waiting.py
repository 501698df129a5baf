"""A rank that sleeps while it waits for Horovod: the same bits, and hangs are named as before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.hangs import hang_one
from tests.launching import lockstep, require_backend, train
from tests.sparing import in_ci

ASLEEP = ("--wait", "sleep")


@pytest.fixture(autouse=True)
def horovod() -> None:
    require_backend("horovod")


def test_it_sleeps_until_the_reduction_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.torch import mpi_ops

    from backends import horovod_waiting

    done, seen = iter([False, False, True]), []
    monkeypatch.setattr(mpi_ops, "poll", lambda handle: next(done))
    monkeypatch.setattr(time, "sleep", seen.append)
    monkeypatch.setattr(horovod_waiting, "_spin", lambda handle: seen.append(handle))
    monkeypatch.setattr(mpi_ops.mpi_lib, "horovod_torch_wait_and_clear", None)
    horovod_waiting.set_waiting(sleeps=True)
    mpi_ops.mpi_lib.horovod_torch_wait_and_clear(7)
    assert len(seen) == 3
    assert seen[0] == seen[1] <= 1e-3
    assert seen[2] == 7  # Horovod's own wait, which takes the result
    horovod_waiting.set_waiting(sleeps=False)
    assert mpi_ops.mpi_lib.horovod_torch_wait_and_clear is horovod_waiting._spin


def test_it_computes_the_same_bits(tmp_path: Path) -> None:
    options = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "4", "--no-evaluate")
    records = [train("horovod", tmp_path / "spin", *options), train("horovod", tmp_path / "sleep", *options, *ASLEEP)]
    assert [record["ranks"][0]["effective_settings"]["wait"] for record in records] == ["spin", "sleep"]
    assert len({rank["weights_sha256"] for record in records for rank in record["ranks"]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", in_ci(["loops"], ["loops", "waits-alone"]))
def test_a_rank_that_hangs_is_named(tmp_path: Path, fault: str) -> None:
    assert hang_one("horovod", fault, tmp_path / "run", "--hang-timeout", "5", *ASLEEP).problems == []
    assert "horovod_waiting.py" in (tmp_path / "run" / "logs" / "rank0.stacks").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("numbers_of_ranks", in_ci(["2"], ["2", "2,3"]))
def test_it_keeps_the_contract(numbers_of_ranks: str) -> None:
    """Gradients, weights, bits, traffic, overflow, and unused parameters."""
    clauses = ("--num-processes", numbers_of_ranks, "--check", "C09,C16,C17,C24,C25,C26,C27,C30,C37")
    done = lockstep("contract", "horovod", *ASLEEP, *clauses)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "horovod --wait sleep on cpu: 9 passed" in done.stdout


def test_other_words_are_refused(tmp_path: Path) -> None:
    done = lockstep("horovod", "--wait", "nap", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--wait nap" in done.stderr
    assert not (tmp_path / "run").exists()
