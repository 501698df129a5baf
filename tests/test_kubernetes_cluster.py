"""Jobs of Kubernetes, on a real cluster whose only node is this machine (tests/kubernetes/cluster.sh)."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import (
    PROJECT_DIRECTORY,
    ending,
    lockstep,
    processes_of,
    require_backend,
    skip_or_fail,
    start_lockstep,
    train,
    wait_until,
)

CLUSTER = PROJECT_DIRECTORY / "tests" / "kubernetes" / "cluster.sh"
STATE = Path("/run/lockstep-kubernetes")
RESULTS = STATE / "results"
# The node has two cores, of which pods ask for whole ones.
OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1", "--device", "cpu")

LONG = ("--max-steps", "1000", "--num-train-epochs", "1000", "--logging-steps", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster; without its programs these tests are skipped, with REQUIRE_KUBERNETES=1 they fail."""
    missing = subprocess.run([CLUSTER, "missing"], capture_output=True, text=True, check=True).stdout.split()
    reason = None
    if missing:
        reason = f"not on PATH: {' '.join(missing)}"
    elif os.getuid() != 0:
        reason = "only root can start the daemons of a cluster"
    skip_or_fail(reason, "REQUIRE_KUBERNETES")
    was_running = (STATE / "kubelet.pid").exists()
    subprocess.run([CLUSTER, "start"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(STATE / "admin.yaml"))
        yield
    if not was_running:
        subprocess.run([CLUSTER, "stop"], check=True)


@pytest.fixture(scope="module")
def images(cluster: None) -> Callable[[str], str]:
    """Gives the name of a backend's image, which the cluster then has."""
    loaded: dict[str, str] = {}

    def image(backend: str) -> str:
        if backend not in loaded:
            subprocess.run([PROJECT_DIRECTORY / "tests" / "docker" / "images.sh"], check=True, cwd=PROJECT_DIRECTORY)
            loaded[backend] = f"lockstep/{backend}:0.1.0"
            subprocess.run([CLUSTER, "load", loaded[backend]], check=True)
        return loaded[backend]

    return image


def _on_two_nodes(image: str) -> tuple[str, ...]:
    engine = ("--engine", "kubernetes", "--num-nodes", "2", "--image", image)
    return (*engine, "--volume-claim", "results", "--memory", "3Gi")


def _kubectl(*command: str) -> str:
    return subprocess.run(["kubectl", *command], check=True, capture_output=True, text=True).stdout.strip()


def _record(name: str) -> dict[str, Any]:
    (path,) = (RESULTS / name).glob("node*/record.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _new(name: str) -> str:
    """A name that no earlier job has in the volume."""
    return f"{name}-{secrets.token_hex(4)}"


def _nothing_is_left() -> bool:
    return _kubectl("get", "jobs,services,pods", "--selector=app.kubernetes.io/name=lockstep", "--output=name") == ""


pytestmark = [pytest.mark.kubernetes, pytest.mark.processes]


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_two_pods_compute_what_one_machine_does(tmp_path: Path, images: Callable[[str], str], backend: str) -> None:
    require_backend(backend)
    run = tmp_path / _new(backend)
    alone = train(backend, tmp_path / "alone", *OPTIONS, "--num-processes", "2")
    done = lockstep(backend, *_on_two_nodes(images(backend)), *OPTIONS, "--output-dir", run)
    assert done.returncode == 0, done.stdout + done.stderr
    together = _record(run.name)
    for record in (together, alone):
        record["weights"] = [rank["weights_sha256"] for rank in record["ranks"]]
    assert together["weights"] == alone["weights"]
    assert [step["loss"] for step in together["steps"]] == [step["loss"] for step in alone["steps"]]
    assert f"weights   {together['weights'][0][:16]} on every rank" in done.stdout
    assert f"the nodes have written into the volume of results: {run.name}/node*" in done.stdout
    wait_until(_nothing_is_left, "the end of all objects")


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, images: Callable[[str], str]) -> None:
    run = tmp_path / _new("killed")
    pods = _on_two_nodes(images("ddp"))
    with ending(start_lockstep("ddp", *pods, *OPTIONS, *LONG, "--output-dir", run)) as job:
        wait_until(lambda: [*(RESULTS / run.name).glob("node*/progress.jsonl")], "a step")
        ranks = [one for one in processes_of(Path("/runs") / run.name / "node1") if "training.rank" in one.cmdline()]
        ranks[0].kill()
        output, errors = job.communicate(timeout=120)
    assert job.returncode == 1, output + errors
    assert re.search(r"lockstep: .*(node 1|rank 1)", errors), output + errors
    wait_until(_nothing_is_left, "the end of all objects")


def test_ctrl_c_saves_a_checkpoint_from_which_a_second_job_goes_on(
    tmp_path: Path, images: Callable[[str], str]
) -> None:
    run = tmp_path / _new("stopped")
    options = (*_on_two_nodes(images("ddp")), *OPTIONS, *LONG, "--output-dir", run)
    with ending(start_lockstep("ddp", *options)) as job:
        wait_until(lambda: [*(RESULTS / run.name).glob("node*/progress.jsonl")], "a step")
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=180)
    assert job.returncode == 75, output + errors
    stopped = re.search(r"stopped after step (\d+)", output + errors)
    assert stopped is not None, output + errors
    began = time.monotonic()
    refused = lockstep("ddp", *options, "--max-steps", "999", "--resume")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "--max-steps 999: the run to resume has 1000" in refused.stderr
    assert time.monotonic() - began < 200  # where node 1 would wait 300 s for node 0
    done = lockstep("ddp", *options, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _record(run.name)["resumed_from"]["step"] == int(stopped[1])
    wait_until(_nothing_is_left, "the end of all objects")


def test_what_a_killed_command_leaves_is_removed_with_its_job(tmp_path: Path, images: Callable[[str], str]) -> None:
    run = tmp_path / _new("left")
    with ending(start_lockstep("ddp", *_on_two_nodes(images("ddp")), *OPTIONS, *LONG, "--output-dir", run)) as job:
        wait_until(lambda: [*(RESULTS / run.name).glob("node*/progress.jsonl")], "a step")
        job.kill()
        job.communicate(timeout=60)
    (left,) = _kubectl("get", "jobs", "--selector=app.kubernetes.io/name=lockstep", "--output=name").splitlines()
    _kubectl("delete", left)
    wait_until(_nothing_is_left, "the end of all objects")


def test_the_cluster_refuses_what_does_not_fit(tmp_path: Path, images: Callable[[str], str]) -> None:
    options = ("ddp", "--engine", "kubernetes", "--image", images("ddp"), *OPTIONS, "--output-dir", tmp_path / "run")
    for wrong, expected in (
        (("--namespace", "nowhere"), 'namespaces "nowhere" not found'),
        (("--volume-claim", "missing"), "--volume-claim missing: is not there"),
    ):
        done = lockstep(*options, *wrong)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not (tmp_path / "run").exists()


def test_a_job_that_no_node_has_room_for_says_so(tmp_path: Path, images: Callable[[str], str]) -> None:
    options = ("--engine", "kubernetes", "--num-nodes", "1", "--image", images("ddp"), "--cpus", "512", *OPTIONS)
    with ending(start_lockstep("ddp", *options, "--output-dir", tmp_path / "run")) as job:
        assert job.stderr is not None
        said = ""
        while "Insufficient cpu" not in said:
            line = job.stderr.readline()
            assert line, said
            said += line
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=120)
    assert job.returncode == 130
    wait_until(_nothing_is_left, "the end of all objects")
