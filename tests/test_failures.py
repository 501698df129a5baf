"""A rank that fails ends the whole job, soon and by name; nothing half-written is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from backends.capabilities import Signs
from backends.registry import find_backend
from contract.patience import stretched
from launch.errors import UsageError
from launch.nodes import Nodes
from launch.starters.interface import PROJECT_DIRECTORY
from launch.starters.registry import settle_starter
from launch.train_command import train as train_from_command_line
from tests.launching import (
    DISTRIBUTED,
    LOCKSTEP,
    lockstep,
    processes_of,
    require_backend,
    require_start_method,
    train,
    wait_for_steps,
)
from tests.sparing import in_ci
from watch.failures import shows_lost_peer

pytestmark = pytest.mark.launchers


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("[..] Timed out waiting 3000ms for recv operation to complete", True),
        ("[..] Application timeout caused pair closure", True),  # of a collective that begins after another's timeout
        ("RuntimeError: shape '[2, 3]' is invalid", False),
    ],
)
def test_an_error_of_a_rank_that_lost_another_is_told_from_its_own(message: str, is_lost: bool) -> None:
    assert shows_lost_peer(message, Signs()) is is_lost


FAULTS = {
    "raises": "ArithmeticError: the planted error",
    "exits": "SystemExit: 3",
    "is-killed": "ended without a message",
    "hangs": "is stuck: rank 0 waited for it without success",
}
TINY = ("--task", "contract.awkward_tasks:FaultyTask", "--num-processes", "2", "--max-steps", "50", "--timeout", "5")


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param("ddp", "is-killed"),
        *(pytest.param("ddp", fault, marks=pytest.mark.slow) for fault in FAULTS if fault != "is-killed"),
        *(
            pytest.param(backend, "hangs", marks=pytest.mark.slow if backend == "horovod" else pytest.mark.exhaustive)
            for backend in DISTRIBUTED[1:]
        ),
    ],
)
def test_a_failing_rank_ends_the_job_by_name(tmp_path: Path, backend: str, fault: str) -> None:
    require_backend(backend)
    began = time.monotonic()
    done = lockstep(backend, *TINY, "--fault", fault, "--output-dir", tmp_path / "run")
    assert time.monotonic() - began < stretched(40)
    assert done.returncode == 1
    named = re.match(r"lockstep: (\S+) failed: rank 1 \((\S+), step 5, data\): (.*)", done.stderr)
    assert named is not None, done.stderr
    assert named[1] == backend
    assert named[2] == socket.gethostname()
    assert named[3].startswith(FAULTS[fault])
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.count("rank 0") == (fault == "hangs")
    assert "Traceback" not in done.stdout + done.stderr
    assert "logs/rank1." in done.stderr
    assert not processes_of(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["error"].startswith("rank 1 (")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "method"), [("ddp", "torchrun"), ("horovod", "horovodrun")])
def test_a_rank_that_never_begins_is_named(tmp_path: Path, backend: str, method: str) -> None:
    require_backend(backend)
    code = "import os, time\nif '1' in (os.environ.get('RANK'), os.environ.get('HOROVOD_RANK')): time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    options = ("--start-method", method, "--output-dir", tmp_path / "run")
    done = lockstep(backend, *TINY, *options, env={"PYTHONPATH": f"{PROJECT_DIRECTORY}:{tmp_path}"})
    assert done.returncode == 1
    assert re.search(
        "rank 1: did not start: rank 0 waited for it without success|rank 1 had not started$", done.stderr, re.M
    )
    assert not processes_of(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("start_method", [("ddp", "torchrun"), ("ddp", "spawn"), ("horovod", "mpirun")], ids="-".join)
def test_other_start_methods_end_too(tmp_path: Path, start_method: tuple[str, str]) -> None:
    backend, method = start_method
    require_backend(backend)
    require_start_method(method)
    run = tmp_path / "run"
    done = lockstep(backend, *TINY, "--fault", "is-killed", "--start-method", method, "--output-dir", run)
    assert done.returncode == 1
    assert re.search(r"rank 1 \(\S+, step 5, data\): ended without a message", done.stderr)
    assert not processes_of(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "number"),
    in_ci(
        [("ddp", signal.SIGINT), ("horovod", signal.SIGTERM)],
        [*product(("ddp", "horovod"), (signal.SIGINT, signal.SIGTERM))],
    ),
)
def test_an_interrupted_job_leaves_no_process(tmp_path: Path, backend: str, number: signal.Signals) -> None:
    require_backend(backend)
    run = tmp_path / "run"
    command = [str(LOCKSTEP), backend, "--task", "token-tagging", "--max-steps", "1000000", "--output-dir", str(run)]
    job = subprocess.Popen(
        [*command, "--save-every", "never"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    wait_for_steps(run)
    job.send_signal(number)
    _, stderr = job.communicate(timeout=180)
    assert job.returncode == 128 + number
    assert stderr == f"lockstep: interrupted by {number.name}; all ranks have been ended\n"
    assert not processes_of(run)
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["error"]) == ("interrupted", f"interrupted by {number.name}")


def test_a_task_that_cannot_save_leaves_its_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = lockstep("ddp", "--task", "tests.faulty:UnsavableTask", "--max-steps", "2", "--output-dir", run)
    assert done.returncode == 1
    weights = run / "weights.safetensors"
    assert f"the task cannot save its model (ValueError: no such format); its weights are in {weights}" in done.stderr
    assert load_file(weights)["mixer.weight"].shape == (12, 24)
    assert sorted(path.name for path in run.iterdir()) == [
        "logs", "model-files.json", "progress.jsonl", "record.json", "run.json", "weights.safetensors"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_failed_run_keeps_the_steps_it_took(tmp_path: Path) -> None:
    done = lockstep("ddp", *TINY, "--logging-steps", "1", "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [step["step"] for step in record["steps"]] == list(range(1, len(record["steps"]) + 1))
    assert record["steps"][0]["loss"] > 0


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LOCKSTEP_STARTED_AT", "yesterday"),
        ("LOCKSTEP_STARTED_AT", "nan"),
        ("LOCKSTEP_STARTED_AT", "-1"),
        ("LOCKSTEP_STARTED_AT", "0"),
        ("LOCKSTEP_STARTED_AT", "1e12"),
    ],
)
def test_variables_of_our_own_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=f"{variable}='.*' is not .* only .* sets this variable, so unset it"):
        train_from_command_line("single", ["--output-dir", str(tmp_path / "run")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_started_together_do_not_meet(tmp_path: Path) -> None:
    command = [str(LOCKSTEP), "single", "--task", "token-tagging", "--max-steps", "1"]
    jobs = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [job.wait(timeout=180) for job in jobs] == [0, 0]
    assert len(list(tmp_path.glob("runs/*/record.json"))) == 2
    jobs = [
        subprocess.Popen([*command, "--output-dir", "one"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [job.communicate(timeout=180)[1] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2]
    assert "--output-dir" in "".join(errors)


@pytest.mark.slow
def test_no_wrapper_outlives_the_process_group(tmp_path: Path) -> None:
    train("tests.faulty_backends:WatchedBackend", tmp_path / "run", "--task", "token-tagging", "--max-steps", "2")


@pytest.mark.slow
def test_a_rank_that_dies_after_the_last_step_takes_no_model_with_it(tmp_path: Path) -> None:
    """However long that takes; and nothing is left to repeat."""
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowlySavedTask", "--max-steps", "3", "--max-restarts", "1", "--output-dir", run)
    done = lockstep("tests.faulty_backends:LostAtTheEndBackend", *options)
    assert done.returncode == 1
    assert "restart 1" not in done.stderr
    assert "failed: rank 1 (" in done.stderr
    assert "rank 0 saved the model and the record" in done.stderr
    assert json.loads((run / "record.json").read_text())["status"] == "completed"
    assert (run / "model.safetensors").exists()
    assert not processes_of(run)


@pytest.mark.slow
def test_a_launcher_of_another_library_is_noticed(tmp_path: Path) -> None:
    """Two processes that Horovod does not know to be two: each finds itself alone."""
    require_backend("horovod")
    run = tmp_path / "run"
    train("single", run, "--task", "token-tagging", "--max-steps", "1")
    config = json.loads((run / "run.json").read_text()) | {"backend": "horovod", "num_processes": 2}
    (run / "run.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    done = subprocess.run(
        [*command, "-m", "training.rank", str(run), "RANK"], env=environment, capture_output=True, timeout=180
    )
    assert done.returncode != 0
    errors = [json.loads(path.read_text())["message"] for path in run.glob("logs/*.error.json")]
    assert "RuntimeError: asked for 2 ranks, but horovod made a world of 1" in errors


def test_a_parameter_without_gradient_is_refused_by_name(tmp_path: Path) -> None:
    options = ("--task", "contract.awkward_tasks:UnusedParameterTask", "--max-steps", "3")
    done = lockstep("ddp", *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "1 parameter(s) got no gradient: idle" in done.stderr
    assert "--find-unused-parameters" in done.stderr


def test_ranks_are_not_forked_for_gpus() -> None:
    methods = find_backend("ddp").capabilities.start_methods
    assert settle_starter("ddp", methods, None, device="cpu").name == "fork"
    assert settle_starter("ddp", methods, None, device="cuda").name == "torchrun"
    assert settle_starter("ddp", methods, None, device="cpu", nodes=Nodes(2)).name == "torchrun"
    with pytest.raises(UsageError, match=r"--start-method fork: ddp is on GPUs started by torchrun or spawn$"):
        settle_starter("ddp", methods, "fork", device="cuda")
    with pytest.raises(UsageError, match=r"--device cuda: ours is started by fork, without cuda"):
        settle_starter("ours", ["fork"], None, device="cuda")
