"""Entrants that need fewer cores than there are compute on others in each round of a race."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from compare.race import rotation
from compare.race.live import LiveEntrant
from compare.race.messages import Turn
from compare.race.rotation import Rotation
from launch.starters.interface import PROJECT_DIRECTORY

NUM_STEPS = 20
TINY = ["--task", "token-tagging", "--global-batch-size", "16", "--threads-per-rank", "1", "--save-every", "never"]


class Machine:
    """Cores, and the threads of processes that are bound to some of them.

    Attributes:
        masks: The cores that each thread may use, by its number; 0 is the race itself.
    """

    def __init__(self, place: Path, cores: set[int]) -> None:
        self.masks = {0: cores}
        self._place = place

    def start(self, process: int, *masks: set[int]) -> None:
        """Starts a process whose first thread has its number."""
        for thread, cores in enumerate(masks, process):
            self.masks[thread] = cores
            (self._place / str(process) / "task" / str(thread)).mkdir(parents=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four cores, of which a control group hides others."""
    made = Machine(tmp_path, {2, 3, 6, 7})
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(made.masks[thread]))
    monkeypatch.setattr(os, "sched_setaffinity", made.masks.__setitem__)
    monkeypatch.setattr(rotation, "_PROCESSES", tmp_path)
    monkeypatch.setattr(rotation, "_NODES_WITH_MEMORY", tmp_path / "nodes")
    return made


def test_one_rank_visits_all_cores(machine: Machine) -> None:
    machine.start(10, {2}, {2})
    moved = Rotation()
    assert [moved.move([10], number) for number in range(6)] == [[2], [3], [6], [7], [2], [3]]
    assert machine.masks[10] == machine.masks[11] == {3}
    assert moved.move([10], 3) == [7]
    assert machine.masks[10] == machine.masks[11] == {7}


def test_ranks_that_are_bound_apart_stay_apart(machine: Machine) -> None:
    machine.start(10, {2}, {2})
    machine.start(20, {3}, {3})
    moved = Rotation()
    assert moved.move([10, 20], 2) == [6, 7]
    assert [machine.masks[thread] for thread in (10, 11, 20, 21)] == [{6}, {6}, {7}, {7}]
    machine.start(30, {7})  # a process that a rank has started meanwhile
    assert moved.move([10, 20, 30], 3) == [7, 2]
    assert [machine.masks[thread] for thread in (10, 20, 30)] == [{7}, {2}, {2}]


def test_ranks_on_most_cores_visit_all_of_them(machine: Machine) -> None:
    for process, core in ((10, 2), (20, 3), (30, 6)):
        machine.start(process, {core})
    moved = Rotation()
    assert [set(moved.move([10, 20, 30], number)) for number in (0, 1, 4)] == [{2, 3, 6}, {3, 6, 7}, {2, 3, 6}]
    assert [machine.masks[thread] for thread in (10, 20, 30)] == [{2}, {3}, {6}]


@pytest.mark.parametrize("cores", [{3}, {2, 6}, {2, 3, 6, 7}, {3, 6}], ids=["another", "two", "all", "others"])
def test_whoever_is_bound_otherwise_stays(machine: Machine, cores: set[int]) -> None:
    machine.start(10, cores)
    moved = Rotation()
    assert [moved.move([10], number) for number in range(3)] == [[], [], []]
    assert machine.masks[10] == cores


def test_a_thread_that_the_library_binds_elsewhere_stays(machine: Machine) -> None:
    machine.start(10, {2}, {7}, {2, 3})
    assert Rotation().move([10], 1) == [3]
    assert [machine.masks[thread] for thread in (10, 11, 12)] == [{3}, {7}, {2, 3}]


def test_nobody_moves_away_from_its_memory(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("0-1\n")
    machine.start(10, {2})
    assert Rotation().move([10], 1) == []
    assert machine.masks[10] == {2}


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[LiveEntrant]:
    """One process that is bound to the first core, as in a race."""
    options = ["single", *TINY, "--bind-ranks", f"--max-steps={NUM_STEPS}", f"--output-dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=1, address=tmp_path / "socket", environment=environment) as entrant:
        entrant.get_ready()
        yield entrant


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or rotation.has_several_numa_nodes(), reason="nobody is moved on this machine"
)
def test_a_live_entrant_moves_with_all_its_threads(tmp_path: Path, bound: LiveEntrant) -> None:
    cores = sorted(os.sched_getaffinity(0))
    pid = int((tmp_path / "run" / "logs" / "rank0.pid").read_text().split()[0])
    for number, through in enumerate((6, 12, NUM_STEPS)):
        bound.take(Turn(warm_through=through - 4, through=through), number)
        core = cores[number % len(cores)]
        assert bound.cores == [core]
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
    assert bound.end() is None
