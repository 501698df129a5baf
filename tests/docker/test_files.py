"""What can be told of the images without an engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from backends.registry import find_backend
from launch.starters.interface import PROJECT_DIRECTORY
from records.config import RunOptions
from tasks.registry import TASKS, load_task

DOCKER = PROJECT_DIRECTORY / "docker"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))
BACKENDS = [path.parent.name for path in DOCKERFILES]
# That of an image on top of another, for the MPI operator.
FOR_MPI_JOBS = DOCKER / "horovod" / "mpi-operator.Dockerfile"


def test_each_backend_with_packages_of_its_own_has_one() -> None:
    assert BACKENDS == ["accelerate", "apex", "ddp", "deepspeed", "fabric", "horovod"]


@pytest.mark.parametrize("path", [*DOCKERFILES, FOR_MPI_JOBS], ids=[*BACKENDS, "mpi-operator"])
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=BACKENDS)
def test_the_image_runs_as_nobody_in_particular_on_a_pinned_base(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert "USER 1000:1000" in lines
    assert lines[-1].startswith("ENTRYPOINT")
    assert not [line for line in lines if ":latest" in line]
    (base,) = [line for line in lines if line.startswith("ARG BASE_IMAGE=")]
    assert any(character.isdigit() for character in base.rpartition(":")[2])


@pytest.mark.parametrize("path", DOCKERFILES, ids=BACKENDS)
def test_an_image_is_for_the_devices_that_its_backend_can_use(path: Path) -> None:
    text, capabilities = path.read_text(), find_backend(path.parent.name).capabilities
    (variants,) = re.findall(r"^# Variants: (.+)$", text, flags=re.MULTILINE)
    devices = {"cpu": "cpu", "gpu": "cuda"}
    assert {devices[variant] for variant in variants.split()} <= {*capabilities.precisions}
    if "cuda" not in capabilities.precisions and not capabilities.gpus_depend_on_build:
        assert "gpu" not in text.lower()


def test_the_first_layers_are_the_same_so_that_torch_is_stored_once() -> None:
    heads = set()
    for path in DOCKERFILES:
        text = path.read_text()
        start = text.rindex("ARG VARIANT=cpu")
        heads.add(text[start : text.index("install_packages.sh\n", start)])
    assert len(heads) == 1


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return services


def test_all_services_share_the_task_and_are_confined_alike() -> None:
    services = _services()
    assert {*BACKENDS} <= services.keys()
    for service in services.values():
        assert service["env_file"] == "${LOCKSTEP_TASK_ENV:-task.env}"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert {*service["cap_add"]} == {"SETUID", "SETGID"}
        assert service["shm_size"]


def test_only_the_services_of_the_gpu_profile_want_a_gpu() -> None:
    for name, service in _services().items():
        assert ("deploy" in service) == (service.get("profiles") == ["gpu"]) == (name == "apex" or "gpu" in name)


def test_the_launcher_mounts_every_file_that_an_option_names() -> None:
    known = {*re.findall(r"--[a-z-]+", (PROJECT_DIRECTORY / "launch" / "docker.sh").read_text())}
    settings = [RunOptions, *(load_task(name).Settings for name in TASKS)]
    fields = [field for one in settings for field in one.model_fields.items()]
    paths = {
        f"--{name.replace('_', '-')}"
        for name, field in fields
        if Path in (field.annotation, *get_args(field.annotation))
    }
    assert paths >= {"--output-dir", "--train-file", "--data-dir"}
    assert paths <= known


# A Docker client whose every command succeeds, and which notes what it is to run.
CLIENT = """#!/bin/sh
[ "$1" != run ] || printf '%s\\n' "$@" >"$(dirname "$0")/asked"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to somebody else")
def test_for_root_a_container_runs_as_the_owner_of_the_results_with_a_cache_of_its_own(tmp_path: Path) -> None:
    client, runs, own = tmp_path / "docker", tmp_path / "runs", tmp_path / "cache" / "12345-12346"
    client.write_text(CLIENT)
    client.chmod(0o755)
    runs.mkdir()
    os.chown(runs, 12345, 12346)
    command = [PROJECT_DIRECTORY / "launch" / "run.sh", "ddp", "--docker", "--output-dir", runs / "mine"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOCKSTEP_CACHE": str(own.parent)}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[asked.index("--user") + 1] == "12345:12346"
    for path in (runs, own):
        assert f"type=bind,source={path},target={path}" in asked
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
    assert f"LOCKSTEP_CACHE={own}" in asked


def test_any_user_of_an_image_may_pass_the_home_of_root_below_which_files_are_mounted() -> None:
    """Base images let nobody else in, and what root mounts often lies there (test_containers.py)."""
    assert "chmod a+x /root" in (DOCKER / "install_project.sh").read_text().splitlines()
    assert all("install_project.sh" in path.read_text() for path in DOCKERFILES)


def test_any_user_of_an_image_may_read_the_sources_whatever_the_umask_of_the_checkout() -> None:
    """Layers keep the modes of files; the last step of each image opens all of them, once nothing more is added."""
    lines = (DOCKER / "install_project.sh").read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if line == "chmod -R a+rX ."]
    assert max(number for number, line in enumerate(lines) if "install" in line or "launch/run.sh" in line) < place
    for path in DOCKERFILES:
        text = path.read_text()
        assert text.index("COPY . /opt/lockstep\n") < text.index("install_project.sh") < text.index("USER 1000:1000")
