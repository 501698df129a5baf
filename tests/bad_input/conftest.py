"""The place of the commands, and their entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from launch.cli import main
from tests.bad_input.files import write_input, write_packages
from tests.bad_input.place import Outcome, Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("bad-input")
    work, cache, packages = root / "work", root / "cache", root / "packages"
    write_input(work)
    write_packages(packages)
    (cache / "text").mkdir(parents=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOCKSTEP_", "HF_")) and name not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    }
    own = {
        "LOCKSTEP_CACHE": str(cache),
        "HOME": str(work),
        "HF_HOME": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return Place(work, cache, packages, inherited | own)


@pytest.fixture
def lockstep(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Calls the command's entry point in this process: hundreds of new ones would take minutes."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place.work)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return Outcome(exit_.value.code, *capfd.readouterr())

    return call
