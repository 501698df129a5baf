"""A job whose ranks die starts again by itself, from its latest checkpoint, and ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.kills import campaign
from tests.launching import DISTRIBUTED, OF_EACH_STARTER, lockstep, require_backend
from tests.sparing import in_ci

pytestmark = [pytest.mark.launchers, pytest.mark.slow]


def _kill(tmp_path: Path, backends: Sequence[str], num_kills: int) -> None:
    for backend in backends:
        require_backend(backend)
    seed = random.SystemRandom().randrange(2**32)
    kills = campaign(backends, num_kills, tmp_path, seed=seed)
    assert [kill for kill in kills if kill.problems] == [], f"seed {seed}"


_IN_CI = (OF_EACH_STARTER, 4)


@pytest.mark.parametrize(("backends", "num_kills"), in_ci([_IN_CI], [_IN_CI, (DISTRIBUTED, 6), (DISTRIBUTED, 10)]))
def test_ranks_killed_at_random_moments(tmp_path: Path, backends: list[str], num_kills: int) -> None:
    _kill(tmp_path, backends, num_kills)


@pytest.mark.campaign
def test_a_hundred_ranks_killed_at_random_moments(tmp_path: Path) -> None:
    _kill(tmp_path, DISTRIBUTED, 100)


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    """What fails every time fails in the end, and every start's logs are kept."""
    run = tmp_path / "run"
    options = ("--task", "contract.awkward_tasks:FaultyTask", "--max-steps", "20", "--save-every", "1")
    done = lockstep("ddp", *options, "--max-restarts", "2", "--output-dir", run)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    pattern = re.compile("lockstep: restart ([12]) of 2, from step ([0-9]+)")
    restarts = [tuple(map(int, found.groups())) for found in map(pattern.fullmatch, lines) if found is not None]
    assert [number for number, _ in restarts] == [1, 2]
    (_, first), (_, second) = restarts
    # Each start fails in its fifth batch: the first one after four steps, the second one after three, since a start
    # from a checkpoint rehearses with one batch. A checkpoint is written before the next but one begins, so that those
    # of the last two steps may not have been on the disk.
    assert 2 <= first <= 4
    assert first + 1 <= second <= first + 3
    assert sum("ArithmeticError: the planted error" in line for line in lines) == 3
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["restarts"]) == ("failed", 2)
    assert [path.name for path in sorted((run / "attempts").iterdir())] == ["1", "2"]
    for number in (1, 2):
        assert json.loads((run / "attempts" / str(number) / "record.json").read_text())["status"] == "failed"
        assert (run / "attempts" / str(number) / "logs" / "rank1.log").exists()


def test_a_hang_is_restarted_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:HangingTask", "--fault", "loops", "--faulty-batch", "7", "--save-every", "2")
    options = (*options, "--max-steps", "10", "--hang-timeout", "4", "--max-restarts", "1")
    done = lockstep("ddp", *options, "--output-dir", run)
    # It hangs in the seventh batch of a process; the second one has only four left to do.
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, from step 6" in done.stderr
    record = json.loads((run / "record.json").read_text())
    assert record["resumed_from"]["step"] == 6
    assert record["restarts"] == 1
