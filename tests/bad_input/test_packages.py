"""Libraries that are missing, damaged or other than their name says; adapters and tasks that cannot be imported."""

from __future__ import annotations

import shlex

import pytest

from backends.registry import BACKENDS
from tests.bad_input.place import LOCKSTEP, Place, run

# id -> (what is on PYTHONPATH, arguments of lockstep, what the message must contain...)
PACKAGE_CASES = {
    "horovod-not-built": ("no-horovod", "horovod", "horovod is not built", "run launch/run.sh horovod"),
    "horovod-without-torch": ("bare-horovod", "horovod", "without its PyTorch extension", "run launch/run.sh horovod"),
    "horovod-with-port": (
        "horovod",
        "horovod --master-port 29511",
        "--master-port 29511",
        "horovodrun",
        "leave it out",
    ),
    "horovod-start-method": (
        "horovod",
        "horovod --start-method torchrun",
        "torchrun",
        "horovodrun, mpirun, horovod-node or horovod-torchrun",
    ),
    "accelerate-missing": ("no-accelerate", "accelerate", "accelerate is not installed", "pip install 'accelerate"),
    "accelerate-fp16-on-cpu": ("accelerate", "accelerate --precision fp16", "--precision fp16", "choose fp32 or bf16"),
    "apex-missing": ("no-apex", "apex", "apex is not installed", "nvcr.io/nvidia/pytorch:25.04-py3"),
    "apex-of-pypi": ("pyramid-apex", "apex", "PyPI's Pyramid toolkit", "pip uninstall apex", "25.04"),
    "apex-too-new": ("new-apex", "apex", "no amp or parallel", "25.04"),
    "apex-without-gpu": ("apex", "apex", "needs a CUDA GPU", "use ddp"),
    "dp-without-gpus": ("own", "dp", "dp cannot run here", "no GPU is visible", "use single, or ddp"),
    "own-backend-broken": ("own", "broken_syntax:Adapter", "'broken_syntax:Adapter'", "invalid syntax"),
    "own-backend-raises": ("own", "raising:Adapter", "'raising:Adapter'", "no licence found"),
    "own-backend-undeclared": ("own", "own_backend:Undeclared", "'own_backend:Undeclared'", "declares capabilities"),
    "own-task-raises": ("own", "ddp --task raising:Task", "'raising:Task'", "no licence found"),
}


@pytest.mark.parametrize("case", PACKAGE_CASES)
def test_is_refused_with_these_packages(place: Place, case: str) -> None:
    packages, arguments, *fragments = PACKAGE_CASES[case]
    with place.untouched():
        outcome = run(place, LOCKSTEP, *shlex.split(arguments), PYTHONPATH=str(place.packages / packages))
        outcome.assert_refused(*fragments)


@pytest.mark.parametrize("name", ["horovod", "accelerate", "apex"])
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.packages.find_spec", lambda _: None)
    reason = BACKENDS[name].unavailable_reason()
    assert reason is not None
    assert reason.startswith(f"{name} is not ")
    assert "\n" not in reason
