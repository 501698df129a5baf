"""Nodes that leave a job and return to it: the others go on, and what is trained stays what it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from records.checkpoint import list_checkpoints
from tests.launching import (
    ending,
    free_port,
    require_backend,
    start_lockstep,
    starting,
    train,
    trains,
    wait_until,
)
from tests.resuming import assert_equal_to_rounding
from watch.rank_files import started_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = ("--max-steps", "14", "--save-every", "1", "--threads-per-rank", "1")


def _kill(node: subprocess.Popen[str], place: Path) -> None:
    """Kills the launcher of a node, whose guardian kills its starter, and its rank."""
    ranks = [pid for rank in started_ranks(place) if (pid := rank.running_pid())]
    node.kill()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.mark.parametrize("backend", ["ddp", "accelerate"])
def test_a_node_leaves_and_returns(tmp_path: Path, backend: str) -> None:
    """Kills all of one node, lets the other go on alone, and starts the node again with the command it had."""
    require_backend(backend)
    with starting("forked"):
        train("single", tmp_path / "undisturbed", *OPTIONS, "--task", "token-tagging")
    where = ("--num-nodes", "2", "--min-nodes", "1", "--master-addr", "127.0.0.1", "--master-port", free_port())
    options = (*OPTIONS, "--task", "tests.faulty:CompanyTask", "--num-processes", "2", "--max-restarts", "3")
    options = (*options, "--hang-timeout", "0", "--resume")  # alone, a rank waits for the other on purpose

    def start(node_rank: int) -> subprocess.Popen[str]:
        place = tmp_path / f"node{node_rank}"
        return start_lockstep(backend, *options, *where, "--node-rank", str(node_rank), "--output-dir", place)

    with ending(start(0)) as first, ending(start(1)) as second:
        wait_until(lambda: trains(tmp_path / "node1"), "a rank of the second node in training")
        _kill(second, tmp_path / "node1")
        news = tmp_path / "node0" / "progress.jsonl"
        wait_until(lambda: _worlds(news) == [2, 1] or None, "the first node alone")
        with ending(start(1)) as again:
            outputs = [job.communicate(timeout=300) for job in (first, again)]
    assert [first.returncode, again.returncode] == [0, 0], outputs
    (path,) = tmp_path.glob("node*/record.json")
    record = json.loads(path.read_text())
    assert [world["num_processes"] for world in record["worlds"]] == [2, 1, 2]
    assert [step["step"] for step in record["steps"]] == [*range(1, 15)]
    assert len(record["ranks"]) == record["config"]["num_processes"] == 2
    assert_equal_to_rounding(path.parent, tmp_path / "undisturbed", rel=1e-11)
    assert all(list_checkpoints(tmp_path / f"node{number}") for number in (0, 1))


def _worlds(news: Path) -> list[int]:
    """The numbers of ranks that a run has had, by the last that it said of them."""
    lines = [json.loads(line) for line in news.read_text().splitlines()] if news.exists() else []
    told = [line["worlds"] for line in lines if line["event"] == "resumed"]
    return [world["num_processes"] for world in told[-1]] if told else []
