"""What can be told of the images without an engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from launch.starters.interface import PROJECT_DIRECTORY
from records.config import RunOptions
from tasks.registry import TASKS, load_task

DOCKER = PROJECT_DIRECTORY / "docker"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))
BACKENDS = [path.parent.name for path in DOCKERFILES]


def test_each_backend_with_packages_of_its_own_has_one() -> None:
    assert BACKENDS == ["accelerate", "apex", "ddp", "deepspeed", "fabric", "horovod"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=BACKENDS)
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
