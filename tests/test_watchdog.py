"""Ranks that hang are named soon, whichever the backend; ranks that are merely slow are left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from backends.capabilities import TORCH_SIGNS
from backends.registry import BACKENDS
from contract.patience import stretched
from records.names import LOGS_NAME
from tests.faults.hangs import HANGS, hang_one
from tests.launching import OF_EACH_STARTER, lockstep, processes_of, require_backend
from tests.sparing import in_ci
from training import data
from watch.heartbeat import OWN_PHASES, own_phases, read_position
from watch.rank_files import RankFiles, started_ranks
from watch.watchdog import Hang, Limits, Watchdog

pytestmark = [pytest.mark.launchers, pytest.mark.slow]


@pytest.mark.parametrize(
    ("backend", "fault"),
    in_ci(
        [*zip(OF_EACH_STARTER, HANGS, strict=False), *(("ddp", fault) for fault in HANGS)],
        product(OF_EACH_STARTER, HANGS),
    ),
)
def test_a_rank_that_hangs_is_named(tmp_path: Path, backend: str, fault: str) -> None:
    """The rank, its step and phase, and all stacks: for one fault with all limits as they come, else sooner."""
    require_backend(backend)
    options = () if fault == "is-stopped" else ("--hang-timeout", "5")
    hang = hang_one(backend, fault, tmp_path / "run", *options)
    assert hang.problems == []
    assert hang.seconds < stretched(30 if not options else 20)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["error"].startswith("rank 1 (")


def test_a_rank_that_hangs_in_an_evaluation_is_named(tmp_path: Path) -> None:
    options = ("--task", "tests.faulty:HangingTask", "--fault", "loops", "--faulty-split", "validation")
    options = (*options, "--faulty-batch", "1", "--eval-batch-size", "8", "--hang-timeout", "5")
    done = lockstep("ddp", *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    assert re.match(r"lockstep: ddp failed: rank 1 \(\S+, step 2, data\): hangs: ", done.stderr), done.stderr


def test_workers_that_take_long_to_start_are_no_hang(tmp_path: Path) -> None:
    """torch is loaded for them first; with so short a limit that would be one."""
    options = ("--task", "token-tagging", "--dataloader-num-workers", "2", "--hang-timeout", "1")
    done = lockstep("ddp", *options, "--max-steps", "2", "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("num_workers", "starts"), [(0, 0), (1, 1), (2, 2)])
def test_each_worker_may_take_long_to_start(monkeypatch: pytest.MonkeyPatch, num_workers: int, starts: int) -> None:
    """The second batch comes from the second worker."""
    monkeypatch.setattr(data, "DataLoader", lambda *_, **options: "abcd")
    config, hooks = SimpleNamespace(dataloader_num_workers=num_workers), mock.Mock()
    state = SimpleNamespace(step=0, backend=SimpleNamespace(device=torch.device("cpu")))
    loader: Any = data.Loader(config, None, None, state, hooks)  # type: ignore[arg-type]
    loader.micro_batches = mock.Mock()
    assert "".join(loader.load([])) == "abcd"
    phases = [call.args[0] for call in hooks.on_phase.call_args_list]
    assert phases == ["start"] * starts + ["data"] * (5 - starts)


def test_a_rank_whose_data_loader_hangs_is_named(tmp_path: Path) -> None:
    """The endless loop is in a process of its own, which is ended with the rest."""
    options = ("--task", "tests.faulty:HangingTask", "--fault", "loops", "--faulty-batch", "2", "--hang-timeout", "5")
    done = lockstep("ddp", *options, "--dataloader-num-workers", "1", "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    assert re.match(r"lockstep: ddp failed: rank 1 \(\S+, step 2, data\): hangs: ", done.stderr), done.stderr
    assert "dataloader.py" in (tmp_path / "run" / "logs" / "rank1.stacks").read_text()
    assert not processes_of(tmp_path / "run")


def test_what_is_slow_does_not_hang(tmp_path: Path) -> None:
    """Every batch takes longer than the limit of silence, on one rank after the other; and no limit is none."""
    options = ("--task", "tests.faulty:SlowTask", "--slow-rank", "1", "--max-steps", "1", "--micro-batch-size", "4")
    done = lockstep("ddp", *options, "--seconds", "1", "--hang-timeout", "3", "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    done = lockstep("ddp", *options, "--seconds", "3", "--hang-timeout", "1", "--output-dir", tmp_path / "hung")
    assert done.returncode == 1
    done = lockstep("ddp", *options, "--seconds", "3", "--hang-timeout", "0", "--output-dir", tmp_path / "patient")
    assert done.returncode == 0, done.stderr


RANK = """
import math, os, sys, time
from pathlib import Path
sys.path[:0] = [{project!r}, str(Path(sys.argv[1]) / "site-packages")]
from watch.heartbeat import Heartbeat
from watch.rank_files import RankFiles, reporting
os.environ["RANK"] = sys.argv[2]
files = RankFiles(Path(sys.argv[1]), int(sys.argv[2]))
files.announce()
heartbeat = Heartbeat(files.heartbeat)
heartbeat.enter(sys.argv[3], int(sys.argv[4]))
print("ready", flush=True)
if sys.argv[5] == "waits":
    import horovod.waiting
if sys.argv[5] == "fails":
    RankFiles.report_error = lambda files, error: time.sleep(1000)
    with reporting(Path(sys.argv[1]), "RANK"):
        Heartbeat(files.heartbeat).enter(sys.argv[3], int(sys.argv[4]))
        raise RuntimeError
while sys.argv[5] == "sleeps":
    time.sleep(0.01)
while True:
    math.sqrt(2)
"""


@pytest.fixture
def ranks(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Starts processes that look like ranks: (rank, phase, step, "waits", "sleeps", "computes" or "fails")."""
    (tmp_path / LOGS_NAME).mkdir()
    # Where a rank that waits for others is.
    library = tmp_path / "site-packages" / "horovod"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "waiting.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    started = []

    def start(*wanted: tuple[int, str, int, str]) -> list[subprocess.Popen[str]]:
        for facts in wanted:
            command = [sys.executable, "-c", RANK.format(project=str(Path(__file__).parent.parent)), str(tmp_path)]
            process = subprocess.Popen([*command, *map(str, facts)], stdout=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def _look(
    directory: Path,
    *,
    for_seconds: float = 20.0,
    num_ranks: int | None = None,
    spans_nodes: bool = False,
    own_phases: tuple[str, ...] = OWN_PHASES,
    **limits: float,
) -> Hang | None:
    watchdog = Watchdog(
        directory,
        num_ranks=num_ranks or len(started_ranks(directory)),
        limits=Limits(**{"seconds": 1.0, "long_seconds": 60.0, **limits}),  # type: ignore[arg-type]
        spans_nodes=spans_nodes,
        signs=BACKENDS["horovod"].signs,
        own_phases=own_phases,
    )
    deadline = time.monotonic() + for_seconds
    while time.monotonic() < deadline:
        hang = watchdog.look()
        if hang is not None:
            return hang
        time.sleep(0.1)
    return None


@pytest.mark.parametrize(
    ("wanted", "rank"),
    [
        ([(0, "backward", 7, "waits"), (1, "data", 7, "computes")], 1),
        ([(0, "data", 7, "computes"), (1, "backward", 7, "waits")], 0),
        # All wait. Who reads data has no reason to; else one has left out a collective, and is ahead or alone.
        ([(0, "backward", 7, "waits"), (1, "data", 7, "waits")], 1),
        ([(0, "evaluation", 7, "waits"), (1, "backward", 8, "waits")], 1),
        ([(0, "backward", 7, "waits"), (1, "evaluation", 6, "waits"), (2, "backward", 7, "waits")], 1),
        # Both are at something: the one that is behind.
        ([(0, "data", 8, "computes"), (1, "data", 7, "computes")], 1),
    ],
)
def test_who_it_is(tmp_path: Path, ranks, wanted, rank: int) -> None:  # type: ignore[no-untyped-def]
    ranks(*wanted)
    hang = _look(tmp_path)
    assert hang is not None
    assert hang.rank == rank
    for number, phase, step, _ in wanted:
        assert f"rank {number}: step {step}, {phase}, was at " in hang.message


@pytest.mark.parametrize(("waits_in_forward", "rank"), [(False, 0), (True, None)])
def test_nobody_is_blamed_for_waiting_in_the_forward_pass(tmp_path: Path, ranks, waits_in_forward, rank) -> None:  # type: ignore[no-untyped-def]
    """Where ranks wait for each other there, as with sharded weights, they may all be in the same collective."""
    ranks((0, "forward", 7, "waits"), (1, "forward", 7, "waits"))
    hang = _look(tmp_path, own_phases=own_phases(waits_in_forward=waits_in_forward))
    assert hang is not None
    assert hang.rank == rank


def test_a_rank_that_reports_an_error_does_not_hang(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    """Not for long: it may have lost a rank that hangs, and was ended, on another node."""
    ranks((0, "backward", 7, "fails"), (1, "backward", 7, "waits"))
    assert _look(tmp_path, for_seconds=3, spans_nodes=True) is None
    hang = _look(tmp_path, long_seconds=1.0)
    assert hang is not None
    assert hang.rank == 0


def test_a_stopped_rank_goes_first(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    processes = ranks((0, "data", 7, "computes"), (1, "backward", 7, "computes"))
    processes[1].send_signal(signal.SIGSTOP)
    hang = _look(tmp_path)
    assert hang is not None
    assert hang.rank == 1
    assert "SIGSTOP" in hang.message


def test_ranks_of_another_node(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    ranks((2, "backward", 7, "waits"), (3, "backward", 7, "waits"))
    hang = _look(tmp_path, spans_nodes=True)
    assert hang is not None
    assert hang.rank is None
    assert "waited for another node" in hang.message
    hang = _look(tmp_path)
    assert hang is not None
    assert hang.rank is None
    assert "all ranks have waited for each other" in hang.message


@pytest.mark.parametrize("phase", ["start", "saving", "end"])
def test_long_phases_have_a_longer_limit(tmp_path: Path, ranks, phase: str) -> None:  # type: ignore[no-untyped-def]
    ranks((0, phase, 7, "computes"), (1, "end", 7, "waits"))
    assert _look(tmp_path, for_seconds=3) is None
    assert _look(tmp_path, long_seconds=1.0) is not None


def test_ranks_that_wait_for_their_turn_in_a_race_do_not_hang(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    """However long another entrant takes to start; but a rank that does not come to rest does, and a stopped one."""
    processes = ranks((0, "rest", 7, "sleeps"), (1, "rest", 7, "sleeps"))
    assert _look(tmp_path, for_seconds=3, long_seconds=1.0) is None
    processes[1].send_signal(signal.SIGSTOP)
    hang = _look(tmp_path, long_seconds=1.0)
    assert hang is not None
    assert hang.rank == 1
    processes[1].send_signal(signal.SIGCONT)
    ranks((2, "update", 7, "sleeps"))
    hang = _look(tmp_path, long_seconds=1.0)
    assert hang is not None
    assert hang.rank == 2


@pytest.mark.parametrize("phase", ["forward", "backward", "update", "evaluation"])
def test_a_large_model_may_take_its_time(tmp_path: Path, ranks, phase: str) -> None:  # type: ignore[no-untyped-def]
    """As long as it keeps the processor busy, up to the longer limit; what is idle may not, unless it compiles."""
    ranks((0, phase, 1, "computes"))
    assert _look(tmp_path, for_seconds=3) is None
    assert _look(tmp_path, long_seconds=1.0) is not None


@pytest.mark.parametrize("phase", ["forward", "backward", "update", "evaluation"])
def test_what_is_idle_does_not_compute(tmp_path: Path, ranks, phase: str) -> None:  # type: ignore[no-untyped-def]
    """Unless a model is being compiled, which other processes do."""
    ranks((0, phase, 1, "sleeps"))
    assert _look(tmp_path, for_seconds=3, slow_computing=True) is None
    assert _look(tmp_path) is not None


def test_ranks_that_wait_for_a_core_do_not_hang(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    """Eight on one core, in a phase in which being busy is no excuse: silent for much longer, but not for ever."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        ranks(*((rank, "data", 7, "computes") for rank in range(8)))
    finally:
        os.sched_setaffinity(0, cores)
    assert _look(tmp_path, for_seconds=5) is None
    assert _look(tmp_path, long_seconds=2.0) is not None


@pytest.mark.slow
def test_many_ranks_on_few_cores_do_not_hang(tmp_path: Path) -> None:
    options = ("--task", "token-tagging", "--num-processes", "16", "--max-steps", "3", "--hang-timeout", "1")
    done = lockstep("ddp", *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    num_cores = len(os.sched_getaffinity(0))
    assert (f"16 ranks share {num_cores} core" in done.stdout) == (num_cores < 16)


def test_a_rank_that_never_begins(tmp_path: Path, ranks, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    ranks((0, "start", 0, "waits"))
    monkeypatch.setattr("watch.watchdog._SECONDS_TO_START", 2.0)
    assert _look(tmp_path, num_ranks=2, for_seconds=4, long_seconds=60.0) is None
    assert _look(tmp_path, num_ranks=2, for_seconds=4, long_seconds=1.0, spans_nodes=True) is None
    hang = _look(tmp_path, num_ranks=2, long_seconds=1.0)
    assert hang is not None
    assert hang.rank == 1
    assert re.fullmatch(r"did not start within \d s; 1 of 2 ranks did", hang.message)


def test_a_launcher_that_was_asleep_starts_anew(tmp_path: Path, ranks, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A machine that slept, or a container that was paused, has not heard of its ranks for long."""
    ranks((0, "data", 7, "computes"))
    now = time.monotonic()
    watchdog = Watchdog(tmp_path, num_ranks=1, limits=Limits(5, 60), spans_nodes=False, signs=TORCH_SIGNS)
    monkeypatch.setattr(time, "monotonic", lambda: now + 1000)
    assert watchdog.look() is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 1001)
    assert watchdog.look() is None


def test_the_last_sign_of_life_is_read(tmp_path: Path) -> None:
    """Also of a rank that has ended."""
    script = (
        "import sys; from pathlib import Path; from watch.heartbeat import Heartbeat\n"
        "heartbeat = Heartbeat(Path(sys.argv[1]))\n"
        "import os; os.write(1, b'begin')\n"
        "for step in range(10_000):\n"
        "    heartbeat.enter('forward', step)\n"
        "os.write(1, b'end')\n"
    )
    file = tmp_path / "rank0.heartbeat"
    subprocess.run([sys.executable, "-c", script, file], check=True, cwd=Path(__file__).parent.parent)
    position = read_position(file)
    assert position is not None
    assert (position.step, position.phase) == (9_999, "forward")
    assert RankFiles(tmp_path, 5).position() is None
