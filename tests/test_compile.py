"""A model compiled with torch.compile follows the same trajectory, under every backend that allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.registry import BACKENDS
from launch.errors import UsageError
from launch.resolve import check_compilable, check_compiler
from tests.launching import lockstep, require_backend, train
from tests.sparing import in_ci

pytestmark = pytest.mark.slow

COMPILING = [
    name for name, row in BACKENDS.items() if row.capabilities.compiled_models and "cpu" in row.capabilities.precisions
]

# The second step is shorter than the first: the graph is made again, for any size.
OPTIONS = ("--task", "token-tagging", "--max-steps", "2", "--logging-steps", "1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("single", tmp_path_factory.mktemp("plain") / "run", *OPTIONS)


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fresh, and then shared: a graph that one backend had compiled serves the next."""
    directory = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        yield directory


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("backend", in_ci(["ddp"], COMPILING))
def test_compiled_training_follows_the_plain_one(
    tmp_path: Path, compiler_cache: Path, plain: dict[str, Any], backend: str
) -> None:
    """Ranks that are copies of one process (ddp's own starter) wait for no thread that only that process had."""
    require_backend(backend)
    compiled = train(backend, tmp_path / "run", *OPTIONS, "--torch-compile", "--threads-per-rank", "2")
    # Reports of the task's float64 arithmetic; Inductor may only change the order of sums.
    for one, other in zip(plain["steps"], compiled["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-12)
    for name, value in plain["quality"].items():
        assert compiled["quality"][name] == pytest.approx(value, rel=1e-12)
    assert list(compiler_cache.rglob("*.so")), "nothing was compiled"


@pytest.mark.slow
def test_a_compiled_model_draws_the_same_masks(tmp_path: Path, compiler_cache: Path) -> None:
    # All texts are cut to the same length: the second step takes the graph of the first, and must draw other masks.
    options = ("--batching", "padded", "--max-seq-length", "8", "--dropout", "0.1")
    options += ("--max-steps", "2", "--logging-steps", "1", "--no-evaluate")
    plain, compiled = (
        train("single", tmp_path / option, *options, f"--{option}") for option in ("no-torch-compile", "torch-compile")
    )
    for one, other in zip(plain["steps"], compiled["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)  # the task computes in float32
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_without_a_compiler_it_is_refused(tmp_path: Path) -> None:
    done = lockstep("single", "--torch-compile", "--output-dir", tmp_path / "run", env={"PATH": "/nowhere", "CXX": ""})
    assert done.returncode == 2
    assert "needs the compiler g++, which is not installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_without_the_headers_of_python_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh")  # a compiler that is there
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(UsageError, match=f"{tmp_path}/Python.h, which is not installed"):
        check_compiler("cpu")
    (tmp_path / "Python.h").touch()
    check_compiler("cpu")


def test_apex_refuses_a_compiled_model() -> None:
    with pytest.raises(UsageError, match="apex cannot train a compiled model"):
        check_compilable("apex", BACKENDS["apex"])
