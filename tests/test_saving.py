"""When checkpoints are saved, and what happens where the disk has no room for them or for the model."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from launch.resume import Finished, find_start
from records.checkpoint import Checkpoint, CheckpointState, checkpoint_step, list_checkpoints, read_checkpoint
from records.progress import ProgressLog
from tests.launching import (
    LOCKSTEP,
    ending,
    fill,
    lasting_directory,
    lockstep,
    run_config,
    small_disk,
    train,
    wait_for_steps,
    wait_until,
)
from tests.resuming import weights
from training.keeping import Keeper
from training.saving import CheckpointSaver
from training.writing import WriteProgress
from watch.heartbeat import Heartbeat


@pytest.mark.slow
def test_saving_by_minutes(tmp_path: Path) -> None:
    """Every three seconds of a run that takes at least seven."""
    options = (
        "--task",
        "tests.faulty:SlowTask",
        "--max-steps",
        "14",
        "--seconds",
        "0.5",
        "--logging-steps",
        "1",
        "--keep",
        "100",
    )
    record = train("ddp", tmp_path / "run", *options, "--save-every", "0.05min")
    steps = [checkpoint_step(path) for path in list_checkpoints(tmp_path / "run")]
    assert 1 <= len(steps) <= record["seconds"] / 3


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["continue", "stop"])
def test_a_full_disk(tmp_path: Path, answer: str) -> None:
    """What fitted stays whole; the run says what did not, and goes on or ends, as asked."""
    # Room for three checkpoints of 2 MB, and for a model of a third of that.
    with small_disk(tmp_path / "disk", "7400k") as disk:
        run = disk / "run"
        options = ("--task", "token-tagging", "--hidden-size", "200", "--max-steps", "8", "--save-every", "1")
        done = lockstep("ddp", *options, "--keep", "100", "--on-save-error", answer, "--output-dir", run)
        assert "step 4: the checkpoint could NOT be saved (" in done.stdout
        assert [checkpoint_step(path) for path in list_checkpoints(run)] == [3, 2, 1]
        assert not list((run / "checkpoints").glob(".*"))
        for path in list_checkpoints(run):
            read_checkpoint(path)
        record = json.loads((run / "record.json").read_text())
        if answer == "continue":
            assert done.returncode == 0, done.stderr
            assert record["failed_saves"] == [4, 5, 6, 7]
            assert "NOT SAVED" in done.stdout
            assert weights(run)
        else:
            assert done.returncode == 1
            assert "the checkpoint of step 4 cannot be saved: " in done.stderr
            assert "No space left on device" in done.stderr
            assert record["status"] == "failed"


@pytest.mark.slow
def test_on_a_disk_without_a_byte_left_checkpoints_make_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        run = disk / "run"
        options = ("--task", "tests.faulty:SlowTask", "--hidden-size", "200", "--max-steps", "16", "--save-every", "2")
        command = [str(LOCKSTEP), "ddp", *options, "--output-dir", str(run)]
        with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as job:
            wait_until(lambda: len(list_checkpoints(run)) > 1, "two checkpoints", job=job)  # the newest one stays
            fill(disk)
            _, stderr = job.communicate(timeout=120)
        assert job.returncode == 0, stderr
        assert weights(run)
        for path in list_checkpoints(run):
            read_checkpoint(path)
        assert not list(run.glob(".record*"))
        record = json.loads((run / "record.json").read_text())
        assert record["failed_saves"]
        assert any("removed to make room for the model" in warning for warning in record["warnings"])


@pytest.mark.slow
def test_a_model_without_any_room_goes_elsewhere(tmp_path: Path) -> None:
    """And the record with it; the exit code and the summary say so."""
    with small_disk(tmp_path / "disk", "6m") as disk, lasting_directory() as cache:
        run = disk / "run"
        environment = {**os.environ, "LOCKSTEP_CACHE": str(cache)}
        options = ("--task", "tests.faulty:SlowTask", "--hidden-size", "200", "--max-steps", "8")
        command = [str(LOCKSTEP), "ddp", *options, "--save-every", "never", "--output-dir", str(run)]
        with ending(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        ) as job:
            wait_for_steps(run, job=job)
            fill(disk)
            printed, errors = job.communicate(timeout=120)
        assert job.returncode == 4, printed
        (place,) = (cache / "rescued").iterdir()
        assert f"lockstep: not all results could be saved in {run}; the rest are in {place}\n" in errors
        assert "MODEL IN" in printed
        assert f"could NOT be saved in {run} (" in printed
        assert f"it is in {place}\n" in printed
        record = json.loads((place / "record.json").read_text())
        assert record["status"] == "completed"
        assert record["model_directory"] == str(place)
        assert weights(place)
        assert not (run / "record.json").exists()
        with pytest.raises(Finished, match="there is nothing to resume"):
            find_start("latest", run)
        assert not [*run.glob(".record*"), *place.glob(".record*")]


class _Noted(Heartbeat):
    """Notes the phases that it is told of."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        super().__init__()

    @override
    def enter(self, phase: str, step: int | None = None) -> None:
        super().enter(phase, step)
        self.phases.append(phase)

    def wait_for_sign(self, of: Callable[[], object]) -> None:
        """Does something, after which there must be a sign of life."""
        self.phases.clear()
        of()
        wait_until(lambda: self.phases == ["saving"] * len(self.phases) != [], "a sign of life", seconds=30)


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> _Noted:
    monkeypatch.setattr("training.writing._SECONDS_BETWEEN_LOOKS", 0.02)
    return _Noted()


def test_a_write_that_goes_on_is_alive_and_one_that_stands_still_is_not(tmp_path: Path, heartbeat: _Noted) -> None:
    progress, file = WriteProgress(heartbeat), tmp_path / "file"
    file.touch()
    with progress.watched(lambda: [file, tmp_path / "gone"]):
        assert heartbeat.phases[-1] == "saving"
        for size in (1, 5000):
            heartbeat.wait_for_sign(lambda: file.write_bytes(bytes(size)))  # noqa: B023
        heartbeat.wait_for_sign(progress.note)
        time.sleep(0.1)  # a look that has seen half of the last change
        heartbeat.phases.clear()
        time.sleep(0.3)
        assert heartbeat.phases == []
    file.write_bytes(bytes(9000))
    time.sleep(0.1)
    assert heartbeat.phases == []


def test_blocks_that_are_filled_are_progress(tmp_path: Path, heartbeat: _Noted) -> None:
    """As by safetensors, whose files have their last size from the beginning."""
    file = tmp_path / "file"
    with file.open("wb") as content:
        content.truncate(2**20)
        with WriteProgress(heartbeat).watched(lambda: [file]):
            heartbeat.wait_for_sign(lambda: (content.write(bytes(2**19)), content.flush(), os.fsync(content.fileno())))


def test_a_rank_that_waits_for_a_large_checkpoint_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heartbeat: _Noted
) -> None:
    def write(path: Path, checkpoint: Checkpoint, progressed: Callable[[], None]) -> None:
        wait_until(lambda: heartbeat.phases[-1] == "saving", "the rank that waits")
        path.parent.mkdir()
        heartbeat.wait_for_sign(lambda: path.with_name(f".{path.name}.7").write_bytes(bytes(5000)))
        heartbeat.wait_for_sign(progressed)

    monkeypatch.setattr("training.saving.write_checkpoint", write)
    config = run_config("ddp", 2, tmp_path, micro_batch_size=4, save_every="1")
    checkpoint = Checkpoint(CheckpointState.model_construct(config=config, step=4, best=None), {})
    saver = CheckpointSaver(config, tmp_path, ProgressLog(tmp_path, rank=0), heartbeat, keeps=True)
    saver.save(lambda: checkpoint, wait=True)
    assert saver.failed_steps == []


def test_a_rank_that_writes_a_large_model_is_alive(tmp_path: Path, heartbeat: _Noted) -> None:
    keeper = Keeper(tmp_path, heartbeat, spare=1)

    def write(place: Path) -> None:
        inner = place / ".model.abcdefgh" / "parts"
        inner.mkdir(parents=True)
        heartbeat.wait_for_sign(lambda: (inner / "model.safetensors").write_bytes(bytes(5000)))
        heartbeat.wait_for_sign(keeper.progress.note)

    assert keeper.keep("the model", 1, write, has_substitute=True) == tmp_path
