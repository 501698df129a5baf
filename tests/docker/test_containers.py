"""Real containers: one node, two nodes, what they leave on the host, and how they fail."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from backends.devices import count_gpus
from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import IN_FLOAT32, require_backend, train
from tests.sparing import in_ci

pytestmark = pytest.mark.docker

CONFIG = Path("/run/lockstep-docker/config")
COMPOSE_FILE = PROJECT_DIRECTORY / "docker" / "compose.yaml"
RUN_SH = PROJECT_DIRECTORY / "launch" / "run.sh"
BACKENDS = ("ddp", "accelerate", "horovod")
IMAGES = (*BACKENDS, "fabric", "deepspeed")
# Two ranks wherever they are; a thread each, since that decides the order of sums. BERT where it is about
# what a user runs, the small task where it is about nodes and failures.
BERT = "--num-processes 2 --max-steps 20 --dropout 0.1 --micro-batch-size 8 --threads-per-rank 1"
SMALL = "--task token-tagging --num-processes 2 --max-steps 20 --threads-per-rank 1"
CALLER = 12345


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, env=environment)


class Compose:
    """One project of compose v1 or v2, with a directory for results that belongs to somebody else than root."""

    def __init__(self, version: str, place: Path, options: str) -> None:
        self.options = options
        self.runs = place / "runs"
        self.runs.mkdir()
        os.chown(self.runs, CALLER, CALLER)
        (place / "task.env").write_text(f"LOCKSTEP_OPTIONS={options}\n")
        self._command = ["docker-compose"] if version == "v1" else ["docker", "compose"]
        self._command += ["--project-name", f"lockstep-{uuid.uuid4().hex[:8]}", "--file", str(COMPOSE_FILE)]
        self._variables = {"LOCKSTEP_RUNS_DIR": str(self.runs), "LOCKSTEP_TASK_ENV": str(place / "task.env")}
        if version == "v2" and CONFIG.exists():
            self._variables["DOCKER_CONFIG"] = str(CONFIG)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*self._command, *arguments, **self._variables)

    def containers(self, service: str) -> str:
        return self("--profile", "two-nodes", "ps", "--quiet", service).stdout.strip()


@pytest.fixture
def compose(request: pytest.FixtureRequest, images: dict[str, float], tmp_path: Path) -> Iterator[Compose]:
    version, options = getattr(request, "param", ("v2", SMALL))
    project = Compose(version, tmp_path, options)
    if project("version").returncode:
        pytest.fail("no compose here (tests/docker/engine.sh compose)")
    yield project
    project("--profile", "two-nodes", "down", "--volumes", "--timeout", "1")


class Outside(Protocol):
    def __call__(self, options: str, backend: str = "ddp") -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """The record of the same run without containers; it is the same for all backends that train in float64."""

    @cache
    def record(options: str, backend: str = "ddp") -> dict[str, Any]:
        require_backend(backend)
        return train(backend, tmp_path_factory.mktemp("outside") / "run", *options.split())

    return record


def _record(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "record.json").read_text())
    return record


def _digests(record: dict[str, Any]) -> set[str]:
    return {rank["weights_sha256"] for rank in record["ranks"]}


def _assert_arrived(directory: Path, owner: int, wanted: dict[str, Any]) -> None:
    record = _record(directory)
    assert record["status"] == "completed"
    assert _digests(record) == _digests(wanted)
    assert record["environment"]["allocator"] == "tcmalloc"
    assert (directory / "model.safetensors").stat().st_size > 1000
    assert {path.stat().st_uid for path in [directory, *directory.rglob("*")]} == {owner}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_small(images: dict[str, float], name: str) -> None:
    assert images[name] <= (1.67 if name == "horovod" else 1.49)


@pytest.mark.parametrize(
    ("compose", "name"),
    [(("v2", BERT), "ddp"), (("v1", SMALL), "ddp"), (("v2", BERT), "accelerate"), (("v2", BERT), "horovod")],
    indirect=["compose"],
    ids=["ddp-v2", "ddp-v1", "accelerate-v2", "horovod-v2"],
)
def test_a_service_trains_as_the_owner_of_its_results(compose: Compose, outside: Outside, name: str) -> None:
    done = compose("run", "--rm", name, "--output-dir", "/runs/mine")
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_arrived(compose.runs / "mine", CALLER, outside(compose.options))


# The services above run the others.
@pytest.mark.parametrize("name", in_ci(["ddp", "fabric", "deepspeed"], IMAGES))
def test_the_launcher_runs_an_image_with_the_same_options(
    images: dict[str, float], outside: Outside, tmp_path: Path, name: str
) -> None:
    options, beside = (f"{SMALL} --dtype float32", name) if name in IN_FLOAT32 else (SMALL, "ddp")
    command = (RUN_SH, name, "--docker", *options.split(), "--output-dir", tmp_path / "mine")
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_arrived(tmp_path / "mine", os.getuid(), outside(options, beside))
    again = run(*command)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert "Traceback" not in again.stderr


def _write_texts(place: Path) -> None:
    rows = [f"text number {number} is {word},{word}" for number, word in enumerate(["good", "bad"] * 16)]
    for name in ("train", "validation"):
        (place / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    (place / "options.yaml").write_text("max_steps: 2\nglobal_batch_size: 8\n")


def test_files_that_options_name_are_reached(images: dict[str, float], tmp_path: Path) -> None:
    _write_texts(tmp_path)
    done = subprocess.run(
        [RUN_SH, "ddp", "--docker", "--train-file=train.csv", "--validation-file", "validation.csv", "--config",
         "options.yaml"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (tmp_path / "runs").iterdir()
    assert len(_record(directory)["steps"]) == 2


def test_the_owner_of_results_reaches_a_cache_in_the_home_of_root(images: dict[str, float], tmp_path: Path) -> None:
    _write_texts(tmp_path)
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", CALLER, CALLER)
    files = ("--train-file=train.csv", "--validation-file=validation.csv", "--config=options.yaml")
    with tempfile.TemporaryDirectory(dir="/root") as cache:
        done = subprocess.run(
            [RUN_SH, "ddp", "--docker", *files],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "LOCKSTEP_CACHE": cache},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        kept = [*Path(cache, f"{CALLER}-{CALLER}", "text").rglob("*")]
        assert {path.stat().st_uid for path in kept} == {CALLER}
    assert {path.stat().st_uid for path in (tmp_path / "runs").rglob("*")} == {CALLER}


@pytest.mark.parametrize("name", in_ci(["ddp", "horovod"], BACKENDS))
def test_two_nodes_compute_what_one_does(compose: Compose, outside: Outside, name: str) -> None:
    nodes = [f"{name}-node{rank}" for rank in (0, 1)]
    done = compose("--profile", "two-nodes", "up", *nodes)
    states = [_wait(compose, node, seconds=5) for node in nodes]
    assert states == [0, 0], done.stdout + done.stderr
    assert not (compose.runs / nodes[1] / "record.json").exists()
    _assert_arrived(compose.runs / nodes[0], CALLER, outside(SMALL))
    assert len({rank["hostname"] for rank in _record(compose.runs / nodes[0])["ranks"]}) == 2


# A container that is killed may be gone before its network has told the other end, which then waits in vain.
ENDLESS = SMALL.replace("--max-steps 20", "--max-steps 1000000")


@pytest.mark.parametrize("compose", [("v2", ENDLESS)], indirect=True, ids=["v2"])
@pytest.mark.parametrize(
    ("name", "victim"),
    in_ci(
        [("ddp", 0), ("horovod", 1)],
        [("ddp", 0), ("ddp", 1), ("accelerate", 1), ("horovod", 0), ("horovod", 1)],
    ),
)
def test_the_end_of_a_node_ends_the_other(compose: Compose, name: str, victim: int) -> None:
    nodes = [f"{name}-node{rank}" for rank in (0, 1)]
    assert compose("--profile", "two-nodes", "up", "--detach", *nodes).returncode == 0
    deadline = time.monotonic() + 120
    while not any(_steps(compose.runs / node) >= 3 for node in nodes):
        assert time.monotonic() < deadline, compose("--profile", "two-nodes", "logs").stdout
        time.sleep(0.2)
    run("docker", "kill", compose.containers(nodes[victim]))
    survivor = nodes[1 - victim]
    assert _wait(compose, survivor, seconds=60) == 1
    logs = compose("--profile", "two-nodes", "logs", survivor).stdout
    assert f"lockstep: {name} failed: node {victim}: its command was killed" in logs
    record = compose.runs / survivor / "record.json"
    assert _record(record.parent)["status"] == "failed"
    assert not (record.parent / "model.safetensors").exists()


def _steps(directory: Path) -> int:
    path = directory / "progress.jsonl"
    return path.read_text().count('"step"') if path.exists() else 0


def _wait(compose: Compose, service: str, *, seconds: float) -> int | None:
    """The exit code of a service's container, None if it still runs after so long."""
    identifier = run("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.service={service}",
                     "--latest").stdout.strip()  # fmt: skip
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        running, code = run(
            "docker", "inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}", identifier
        ).stdout.split()
        if running == "false":
            return int(code)
        time.sleep(0.5)
    return None


# Bad input.


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_no_engine(engine: None, tmp_path: Path) -> None:
    done = run(RUN_SH, "ddp", "--docker", DOCKER_HOST=f"unix://{tmp_path}/nothing.sock")
    _refused(done, "no Docker engine answers", "start it")


def test_no_client(tmp_path: Path) -> None:
    for directory in ("/usr/bin", "/bin"):
        for tool in Path(directory).iterdir():
            if not tool.name.startswith("docker") and not (tmp_path / tool.name).exists():
                (tmp_path / tool.name).symlink_to(tool)
    _refused(run("/bin/bash", RUN_SH, "ddp", "--docker", PATH=str(tmp_path)), "docker is not installed")


def test_no_permission_on_the_socket(engine: None) -> None:
    other = ("setpriv", "--reuid", str(CALLER), "--regid", str(CALLER), "--clear-groups")
    with tempfile.TemporaryDirectory() as place:  # one that others may enter, as they may not enter pytest's
        Path(place).chmod(0o755)
        for name in ("launch", "docker", "backends"):
            shutil.copytree(PROJECT_DIRECTORY / name, Path(place) / name)
        shutil.copy(PROJECT_DIRECTORY / "pyproject.toml", place)
        done = run(*other, "bash", f"{place}/launch/run.sh", "ddp", "--docker", HOME="/tmp")
    _refused(done, "may not use the engine's socket")


def test_an_output_directory_that_cannot_be(images: dict[str, float]) -> None:
    _refused(run(RUN_SH, "ddp", "--docker", "--output-dir", "/proc/nowhere/mine"), "--output-dir", "not writable")


@pytest.mark.skipif(count_gpus() > 0, reason="here is a GPU")
def test_a_gpu_without_its_runtime(images: dict[str, float]) -> None:
    done = run(RUN_SH, "ddp", "--docker", "--device", "cuda")
    _refused(done, "NVIDIA's runtime", "nvidia-container-toolkit")


def test_a_backend_without_an_image() -> None:
    _refused(run(RUN_SH, "single", "--docker"), "no image of 'single'", "choose ddp")


def test_an_image_for_another_architecture(images: dict[str, float], tmp_path: Path) -> None:
    """The launcher's check, on an image made of nothing but its architecture and our label."""
    tag = f"lockstep/ddp:{uuid.uuid4().hex[:8]}"
    sourced = "; ".join(f"source {shlex.quote(str(RUN_SH.with_name(name)))}" for name in ("setup.sh", "docker.sh"))
    key = run("bash", "-c", f"{sourced}; sources_key").stdout.strip()
    (tmp_path / "content").mkdir()
    run("tar", "-C", tmp_path / "content", "-cf", tmp_path / "content.tar", ".")
    run("docker", "import", "--change", f"LABEL lockstep.sources={key}", tmp_path / "content.tar", tag)
    # The engine cannot build for another machine, but it loads what says that it is for one.
    run("docker", "save", "--output", tmp_path / "image.tar", tag)
    image = tmp_path / "image"
    image.mkdir()
    run("tar", "-C", image, "-xf", tmp_path / "image.tar")
    config = image / json.loads((image / "manifest.json").read_text())[0]["Config"]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architecture": "s390x"}))
    run("tar", "-C", image, "-cf", tmp_path / "other.tar", ".")
    loaded = run("docker", "load", "--input", tmp_path / "other.tar")
    assert loaded.returncode == 0, loaded.stderr
    try:
        _refused(run("bash", "-c", f"{sourced}; ensure_image ddp {tag}"), "was made for s390x", "docker image rm")
    finally:
        run("docker", "image", "rm", tag)


def test_a_mounted_directory_of_somebody_else(images: dict[str, float], tmp_path: Path) -> None:
    done = run("docker", "run", "--rm", "--volume", f"{tmp_path}:/runs", "lockstep/ddp:0.1.0", "--max-steps", "2")
    _refused(done, "/runs is not writable for user 1000", "--user 0:0")


# Apex, whose base image is out of reach: on another base, everything but the assertion that ends it.


def test_the_image_of_apex_as_far_as_another_base_goes(images: dict[str, float]) -> None:
    base = os.environ.get("LOCKSTEP_BASE_IMAGE", "local/python:3.11-slim")
    build = ("docker", "build", "--file", str(PROJECT_DIRECTORY / "docker" / "apex" / "Dockerfile"))
    build += ("--build-arg", f"BASE_IMAGE={base}", str(PROJECT_DIRECTORY))
    prepared = run(*build, "--target", "prepared", "--tag", "lockstep/apex:prepared", DOCKER_BUILDKIT="0")
    assert prepared.returncode == 0, prepared.stdout[-2000:] + prepared.stderr[-2000:]
    whole = run(*build, DOCKER_BUILDKIT="0")
    assert whole.returncode != 0
    assert "this base image has no Apex with amp and parallel" in whole.stdout + whole.stderr
    inside = ("--entrypoint", "/opt/lockstep/launch/run.sh", "lockstep/apex:prepared", "doctor")
    doctor = run("docker", "run", "--rm", *inside)
    assert "apex is not installed" in doctor.stdout
