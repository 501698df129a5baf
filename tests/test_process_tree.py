"""What the processes of an entrant take of a machine, also those that have ended meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from compare.race.process_tree import ProcessTree

SECONDS = 0.5
# A worker computes, says so, and ends when it is told to; a rank starts it, and waits for its end.
_WORKER = f"""
import time
while time.process_time() < {SECONDS}:
    pass
print("worked", flush=True)
input()
"""
_RANK = f"""
import subprocess, sys
print("ready", flush=True)
input()
worker = subprocess.Popen([sys.executable, "-S", "-c", '''{_WORKER}'''], stdin=subprocess.PIPE, text=True)
input()
worker.communicate("\\n")
print("waited", flush=True)
input()
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", _RANK]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _expect(process, "ready")
    yield process
    process.kill()
    process.communicate()


def _expect(process: subprocess.Popen[str], said: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{said}\n"


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_the_time_of_a_worker_counts_once_before_and_after_its_end(rank: subprocess.Popen[str]) -> None:
    tree = ProcessTree(rank.pid)
    tree.rank_pids = {rank.pid}
    tree.rest()
    before = tree.cpu_seconds()
    tree.race()
    _tell(rank)
    _expect(rank, "worked")
    tree.rest()
    alive = tree.cpu_seconds() - before
    tree.race()
    _tell(rank)
    _expect(rank, "waited")
    tree.rest()
    ended = tree.cpu_seconds() - before
    tree.go_on()
    # The kernel counts in hundredths of a second, and Python itself takes some.
    assert 0.9 * SECONDS < alive < 1.8 * SECONDS
    assert 0.9 * SECONDS < ended < 1.8 * SECONDS
