"""The run record: its schema, and what a real run writes into it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from launch.starters.interface import PROJECT_DIRECTORY
from records.environment import describe_environment, git_state
from records.record import RunRecord, read_record, write_record
from records.throughput import NUM_WARMUP_STEPS, samples_per_second
from tests.launching import train
from training.clock import why_no_instructions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("record") / "run"
    train("ddp", directory, "--max-steps", "12", "--num-processes", "2", "--micro-batch-size", "8")
    return directory


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((PROJECT_DIRECTORY / "records" / "record.schema.json").read_text())
    return schema


def test_the_schema_in_the_repository_is_the_one_in_force() -> None:
    assert _schema() == RunRecord.model_json_schema()


def test_a_run_leaves_a_valid_record(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    jsonschema.validate(content, _schema())
    assert content["status"] == "completed"
    assert content["gradient_accumulation_steps"] == 2
    assert content["config"]["backend"] == "ddp"
    assert [step["step"] for step in content["steps"]] == list(range(1, 13))
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in content["steps"])
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert sum(sum(rank["samples"]) for rank in content["ranks"]) == 12 * 32
    for rank in content["ranks"]:
        assert len(rank["step_seconds"]) == len(rank["samples"]) == len(rank["tokens"]) == 12
        assert len(rank["step_cpu_seconds"]) == 12
        assert 0 < sum(rank["step_cpu_seconds"]) < rank["cpu_seconds"]
        if why_no_instructions() is not None:
            assert rank["step_instructions"] is None
        assert all(real <= computed for real, computed in zip(rank["tokens"], rank["positions"], strict=True))
        assert rank["peak_memory_bytes"] > 100 * 2**20
        assert rank["num_threads"] == content["config"]["threads_per_rank"]
    assert content["environment"]["packages"]["torch"]
    assert 0 < content["seconds_to_first_step"] < content["seconds"]


def test_variables_are_noted_unless_they_say_where_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "NCCL_DEBUG", "TORCH_EXTENSIONS_DIR", "HOME"):
        monkeypatch.setenv(name, "something")
    variables = describe_environment(with_torch=False).variables
    assert variables["NCCL_DEBUG"] == "something"
    assert not {"CUDA_HOME", "TORCH_EXTENSIONS_DIR", "HOME"} & set(variables)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_somebody_elses_repository_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is installed into a virtual environment inside that repository."""
    monkeypatch.delenv("LOCKSTEP_REVISION", raising=False)

    def git(*arguments: str) -> str:
        author = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "venv" / "records" / "environment.py"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "theirs.py").touch()
    git("init", "--quiet")
    git("add", "theirs.py")
    git("commit", "--quiet", "--message", "theirs")
    assert git_state(file) == (None, None)
    monkeypatch.setenv("LOCKSTEP_REVISION", "of-an-image")
    assert git_state(file) == ("of-an-image", None)
    git("add", ".")
    git("commit", "--quiet", "--message", "ours")
    assert git_state(file) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "theirs.py").write_text("changed")
    assert git_state(file) == (git("rev-parse", "HEAD"), True)


def test_a_record_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    record = read_record(run / "record.json")
    with pytest.raises(FileExistsError):
        write_record(record, run)
    write_record(record, tmp_path)
    assert read_record(tmp_path / "record.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_record_from_before_there_were_a_processor_clock_and_work_can_be_read(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    for rank in content["ranks"]:
        del rank["step_cpu_seconds"], rank["step_instructions"], rank["work"]
    jsonschema.validate(content, _schema())
    for rank in RunRecord.model_validate(content).ranks:
        assert rank.step_cpu_seconds == rank.work == []
        assert rank.step_instructions is None


@pytest.mark.parametrize("name", ["step_cpu_seconds", "step_instructions", "work"])
def test_a_list_that_lacks_a_step_is_refused(run: Path, name: str) -> None:
    content = json.loads((run / "record.json").read_text())
    content["ranks"][1][name] = [1] * 11
    with pytest.raises(ValidationError, match=f"rank 1 has 11 {name} of 12 steps"):
        RunRecord.model_validate(content)


def test_throughput_is_all_samples_over_the_slowest_rank(run: Path) -> None:
    record = read_record(run / "record.json")
    for rank, seconds in zip(record.ranks, (0.5, 1.0), strict=True):
        rank.step_seconds[:] = [100.0] * NUM_WARMUP_STEPS + [seconds] * (12 - NUM_WARMUP_STEPS)
    assert samples_per_second(record) == pytest.approx(32.0)


def test_a_second_run_needs_overwrite_and_then_replaces(run: Path) -> None:
    before = (run / "record.json").read_bytes()
    (run / "model.safetensors").unlink()
    train("single", run, "--max-steps", "1", "--overwrite")
    assert (run / "record.json").read_bytes() != before
    assert (run / "model.safetensors").exists()
