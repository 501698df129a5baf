"""The example of a task of one's own, which is not about text, trained as its first lines and the README say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backends.single import SingleBackend
from launch.starters.interface import PROJECT_DIRECTORY
from records.checkpoint import checkpoint_path
from tasks.interface import Batch, Task, TaskInputError, facts_of
from tasks.registry import load_task
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.launching import EXAMPLES, lockstep, run_config
from training.loop import Trainer

PLACE = PROJECT_DIRECTORY / "docs" / "examples"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output directories of one process and of two ranks."""
    directory = tmp_path_factory.mktemp("spirals")
    for backend in ("single", "ddp"):
        output = ("--output-dir", directory / backend)
        done = lockstep(backend, "--task", "spirals:SpiralsTask", *output, env=EXAMPLES)
        assert done.returncode == 0, done.stderr
        assert "4,000 train, 1,000 validation" in done.stdout + done.stderr
    return {backend: directory / backend for backend in ("single", "ddp")}


def test_it_learns(models: dict[str, Path]) -> None:
    for directory in models.values():
        record = json.loads((directory / "record.json").read_text())
        assert record["quality"]["accuracy"] > 0.95


def test_two_ranks_end_where_one_process_ends(models: dict[str, Path]) -> None:
    one, two = (load_file(models[backend] / "model.safetensors") for backend in ("single", "ddp"))
    assert one.keys() == two.keys()
    for name, weights in one.items():
        assert weights.sub(two[name]).abs().max() < 1e-4


def test_its_options_are_options_of_the_command_line(tmp_path: Path) -> None:
    command = ("single", "--task", "spirals:SpiralsTask", "--output-dir", tmp_path / "run", "--num-points", "3")
    done = lockstep(*command, env=EXAMPLES)
    assert done.returncode == 2
    assert "--num-points 3" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_modules_of_the_user_take_no_place_of_ours(tmp_path: Path) -> None:
    """A training.py beside one's own task is common."""
    for name in ("training", "records", "watch", "tasks", "backends"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is not the project')\n")
    options = ("--task", "spirals:SpiralsTask", "--max-steps", "1", "--output-dir", tmp_path / "run")
    done = lockstep("ddp", *options, env={"PYTHONPATH": f"{tmp_path}:{PLACE}"})
    assert done.returncode == 0, done.stderr


def test_it_is_short() -> None:
    assert len((PLACE / "spirals.py").read_text().splitlines()) < 90


class _EvaluatedInFloat32(TokenTagging):
    def evaluation_rows(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return super().evaluation_rows(model, batch).float()


def test_a_task_may_evaluate_in_float32(tmp_path: Path) -> None:
    """Its own choice, or that of Apex's O1, which replaces functions of torch."""
    found = []
    for kind in (TokenTagging, _EvaluatedInFloat32):
        task = kind(TokenTaggingSettings())
        task.prepare()
        config = run_config("single", 1, tmp_path, global_batch_size=4, micro_batch_size=4)
        trainer = Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))
        trainer.evaluate(0)
        found.append(trainer.state.trajectory.evaluations[-1].metrics)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class _Described(TokenTagging):
    """A task that tells what JSON writes, but reads otherwise."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "image_size": (28, 28), "classes": {0: 10}}


def test_a_task_that_tells_of_tuples_is_the_same_when_it_goes_on(tmp_path: Path) -> None:
    task = _Described(TokenTaggingSettings())
    task.prepare()
    facts = facts_of(task)
    assert (facts["image_size"], facts["classes"]) == ([28, 28], {"0": 10})
    own = ("single", "--task", "tests.test_own_task:_Described")
    first = lockstep(*own, "--max-steps", "3", "--save-every", "2", "--output-dir", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    checkpoint = checkpoint_path(tmp_path / "first", 2)
    then = lockstep(*own, "--resume", checkpoint, "--output-dir", tmp_path / "then")
    assert then.returncode == 0, then.stderr


def test_what_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TokenTagging(TokenTaggingSettings())
    monkeypatch.setattr(task, "describe", lambda: {"size": {1, 2}})
    with pytest.raises(TypeError, match=r"describe\(\) of the task returns what cannot be written as JSON"):
        facts_of(task)


class UnfinishedTask(Task):
    """What somebody has who has just begun."""

    def prepare(self) -> None:
        pass


def test_an_unfinished_task_is_refused_with_what_it_lacks() -> None:
    lacks = (
        r"^task 'tests\.test_own_task:UnfinishedTask' lacks name, Settings, build_model, .*num_samples.*; define them"
    )
    with pytest.raises(TaskInputError, match=lacks) as refusal:
        load_task("tests.test_own_task:UnfinishedTask")
    assert "prepare" not in str(refusal.value)
