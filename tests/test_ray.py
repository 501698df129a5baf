"""The engine ray: nodes as actors, on a small cluster of this machine that is started for these tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launching import ending, free_port, lockstep, processes_of, require, start_lockstep, train, wait_until

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_NODES = ("--engine", "ray", "--num-nodes", "2")
needs_ray = pytest.mark.usefixtures("installed_ray")


@pytest.fixture(scope="module")
def installed_ray() -> None:
    """Skips where Ray is not installed, unless LOCKSTEP_REQUIRE lists it."""
    lacks = shutil.which("ray", path=str(Path(sys.executable).parent)) is None
    require("ray", "Ray is not installed (pip install '.[ray]')" if lacks else None)


@pytest.fixture(scope="module")
def cluster(installed_ray: None) -> Iterator[str]:
    """The address of a cluster with one machine and two processors."""
    port = free_port()
    # The names of its sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        head = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"),
            *(
                f"--port={port}",
                f"--temp-dir={place}",
                "--include-dashboard=false",
                "--object-store-memory=80000000",
            ),
        ]
        with (Path(place) / "head.log").open("w") as log:
            # Ray would let other processes of this machine go first.
            environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
            ray = subprocess.Popen(head, stdout=log, stderr=log, env=environment)
        try:
            said = Path(place) / "head.log"
            wait_until(lambda: "Ray runtime started" in said.read_text(), "the cluster", job=ray)
            yield f"127.0.0.1:{port}"
        finally:
            parts = psutil.Process(ray.pid).children(recursive=True)
            ray.terminate()
            ray.wait(timeout=60)
            for part in psutil.wait_procs(parts, timeout=10)[1]:
                part.kill()


def _nothing_left(run: Path) -> None:
    places = [run, *(run / f"node{node}" for node in (0, 1))]
    wait_until(lambda: not [one for place in places for one in processes_of(place)], "the end of all processes")


@needs_ray
@pytest.mark.slow
def test_two_nodes_compute_what_one_does(tmp_path: Path, cluster: str) -> None:
    alone = train("ddp", tmp_path / "alone", *OPTIONS, "--num-processes", "2")
    place = ("--address", cluster, "--placement", "pack", "--output-dir", tmp_path / "run")
    done = lockstep("ddp", *TWO_NODES, *OPTIONS, *place)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "run").glob("node*/record.json")
    together = json.loads(path.read_text())
    assert [rank["weights_sha256"] for rank in together["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert [step["loss"] for step in together["steps"]] == [step["loss"] for step in alone["steps"]]
    assert done.stderr == ""


@needs_ray
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path: Path, cluster: str, number: signal.Signals) -> None:
    place = ("--address", cluster, "--placement", "pack", "--output-dir", tmp_path / "run")
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, "--max-steps", "5000", *place)) as job:
        wait_until(lambda: list((tmp_path / "run").glob("node*/progress.jsonl")), "a step")
        job.send_signal(number)
        output, errors = job.communicate(timeout=180)
    assert job.returncode == (75 if number == signal.SIGTERM else -number), output + errors
    _nothing_left(tmp_path / "run")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "actor"])
def test_what_is_killed_is_named_and_ends_all_nodes(tmp_path: Path, cluster: str, what: str) -> None:
    run = tmp_path / "run"
    place = ("--address", cluster, "--placement", "pack", "--output-dir", run)
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, "--max-steps", "5000", *place)) as job:
        wait_until(lambda: list(run.glob("node*/progress.jsonl")), "a step")
        pid = next((run / "node1" / "logs").glob("rank*.pid"))
        if what == "rank":
            os.kill(int(pid.read_text().split()[0]), signal.SIGKILL)
        else:
            (host,) = [one for one in processes_of(run / "node1.log") if "engines.on_host" in one.cmdline()]
            os.kill(host.ppid(), signal.SIGKILL)
        output, errors = job.communicate(timeout=180)
    assert job.returncode == 1, output + errors
    rank = f"{pid.stem[:4]} {pid.stem[4:]}"
    told = f"lockstep: node 1: ddp failed: {rank} (" if what == "rank" else "lockstep: node 1 was lost: "
    assert told in errors
    _nothing_left(run)


@needs_ray
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_without_room_is_waited_for(tmp_path: Path, cluster: str, number: signal.Signals) -> None:
    place = ("--address", cluster, "--cpus-per-node", "2", "--output-dir", tmp_path / "run")
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, *place)) as job:
        assert job.stderr is not None
        assert job.stderr.readline() == (
            "lockstep: waiting for room for 2 nodes with 2 CPUs on machines of their own; the cluster has 1 machine, "
            "with 2 of 2 CPUs free\n"
        )
        job.send_signal(number)
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert errors == f"lockstep: interrupted by {number.name}\n"


@needs_ray
def test_no_cluster(tmp_path: Path) -> None:
    done = lockstep("ddp", *TWO_NODES, *OPTIONS, "--address", "127.0.0.1:1", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: --address 127.0.0.1:1: no Ray cluster answers (")
    assert "ray start --head" in line


REFUSALS = {
    "address": ("--address somewhere", "--address somewhere", "10.0.0.1:6379"),
    "client": ("--address ray://10.0.0.1:10001", "--address ray://10.0.0.1:10001", "10.0.0.1:6379"),
    "placement": ("--placement left", "--placement left", "pack"),
    "no-processors": ("--cpus-per-node 0", "--cpus-per-node 0", "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    done = lockstep("ddp", *TWO_NODES, *arguments.split(), "--output-dir", tmp_path / "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_ray_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError")
    options = (*TWO_NODES, "--output-dir", tmp_path / "run")
    done = lockstep("ddp", *options, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: --engine ray: Ray is not installed; run pip install '.[ray]'")


def test_a_dry_run_needs_no_cluster(tmp_path: Path) -> None:
    options = ("--num-processes", "8", "--gpus-per-node", "4", "--dry-run", "--output-dir", tmp_path / "run")
    done = lockstep("ddp", *TWO_NODES, *options)
    assert done.returncode == 0, done.stderr
    first, *nodes = done.stdout.splitlines()
    assert first == "# placement group: 2 x {'CPU': 4, 'GPU': 4}, STRICT_SPREAD"
    assert len(nodes) == 2
    assert all(f"--node-rank={rank} --master-addr=ADDRESS_OF_NODE_0" in line for rank, line in enumerate(nodes))
    assert all("--threads-per-rank=1" in line for line in nodes)
