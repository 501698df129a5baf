"""A finished training finds a place for its results; a new run removes what runs wrote, and nothing else."""

from __future__ import annotations

import errno
import json
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from launch.errors import UsageError
from launch.run_directory import refuse_collisions
from records.checkpoint import Checkpoint, CheckpointState, list_checkpoints
from records.news import SaveFailed
from records.notice import give_notice, prepare_notice, read_notice
from records.progress import ProgressLog
from records.run_files import files_of_run, model_files, note_model_files, other_files, remove_run
from tests.launching import (
    fill,
    lasting_directory,
    lockstep,
    run_config,
    small_disk,
    start_lockstep,
    train,
    wait_for_steps,
    wait_until,
)
from training.keeping import Keeper
from training.room import free_bytes, is_in_memory, require_room
from training.saving import CheckpointSaver
from watch.heartbeat import Heartbeat, read_position

MIB = 2**20
PATTERNS = ("model.safetensors", "config.json")


def _write(place: Path, size: int = 3 * MIB) -> None:
    """Writes so many bytes, or nothing."""
    path = place / "model.safetensors"
    try:
        path.write_bytes(bytes(size))
    except OSError:
        path.unlink()
        raise


def _run(directory: Path, *checkpoints: int) -> Path:
    (directory / "logs").mkdir(parents=True)
    (directory / "checkpoints").mkdir()
    for step in checkpoints:
        (directory / "checkpoints" / f"step-{step:08d}.safetensors").write_bytes(bytes(MIB))
    prepare_notice(directory)
    return directory


def test_the_oldest_checkpoints_make_room(tmp_path: Path) -> None:
    """As many as needed, and not the one that holds the weights to be saved."""
    with small_disk(tmp_path / "disk", "6m") as disk:
        run = _run(disk / "run", 1, 2, 3, 4)
        (disk / "rest").write_bytes(bytes(MIB // 2))
        keeper = Keeper(run, Heartbeat(), spare=1)
        assert keeper.keep("the model", 3 * MIB, _write) == run
        assert keeper.dropped == [2, 3]
        assert [path.name[-13:] for path in sorted((run / "checkpoints").iterdir())] == [
            "1.safetensors",
            "4.safetensors",
        ]


def test_checkpoints_that_would_not_make_enough_room_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the newest, whatever it would make."""
    with small_disk(tmp_path / "disk", "5m") as disk, lasting_directory() as cache:
        monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))
        run = _run(disk / "run", 1, 2, 3)
        keeper = Keeper(run, Heartbeat(), spare=1)
        assert keeper.keep("the model", 4 * MIB, lambda place: _write(place, 4 * MIB)).parent == cache / "rescued"
        assert keeper.dropped == []
        assert len(list((run / "checkpoints").iterdir())) == 3


def test_another_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk, lasting_directory() as cache:
        monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))
        run = _run(disk / "run", 9)
        place = Keeper(run, Heartbeat(), spare=9).keep("the model", 3 * MIB, _write)
        assert place.parent == cache / "rescued"
        assert place.name.startswith("run.")
        assert (place / "model.safetensors").stat().st_size == 3 * MIB
        assert (run / "checkpoints" / "step-00000009.safetensors").exists()
        assert f"the model could NOT be saved in {run} (" in read_notice(run).text
        assert read_notice(run).refuge == place


def test_memory_is_no_place_to_keep_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody names it."""
    run = _run(tmp_path / "run")
    keeper = Keeper(run, Heartbeat(), spare=9)
    with small_disk(tmp_path / "memory", "3m") as memory, lasting_directory() as lasting:
        assert (is_in_memory(memory), is_in_memory(lasting)) == (True, False)
        monkeypatch.setenv("LOCKSTEP_CACHE", str(memory / "cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(memory))
        assert list(keeper._other_places()) == []
        asked = memory / "asked"
        asked.mkdir()
        (run / "logs" / "save-to").write_text(str(asked))
        assert [place.parent for place in keeper._other_places()] == [asked]


def test_where_nothing_can_be_told_a_place_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's directory has been removed meanwhile."""
    with lasting_directory() as cache:
        monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))
        place = Keeper(tmp_path / "gone", Heartbeat(), spare=9).keep("the model", 1, lambda place: _write(place, 1))
        assert place.parent == cache / "rescued"
        assert free_bytes(tmp_path / "gone") == 0


@pytest.mark.parametrize("answer", ["room", "link", "name"])
def test_it_waits_until_somebody_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Nor do the cache and the directory for temporary files have room; a rank that waits shows signs of life."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("training.keeping._SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr("training.keeping._SECONDS_BETWEEN_ATTEMPTS", 0.2)
    with small_disk(tmp_path / "disk", "3200k") as disk:
        run = _run(disk / "run", 9)
        (run / "logs" / "save-to").write_text("nowhere")
        (disk / "rest").write_bytes(bytes(3 * MIB // 4))
        monkeypatch.setenv("LOCKSTEP_CACHE", str(disk / "cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        heartbeat = Heartbeat(tmp_path / "heartbeat")
        with ThreadPoolExecutor(1) as helper:
            seen = helper.submit(_help, run, answer, elsewhere)
            place = Keeper(run, heartbeat, spare=9).keep("the model", 2 * MIB, lambda place: _write(place, 2 * MIB))
            text, moments = seen.result()
        assert place == run if answer == "room" else place.parent == elsewhere
        assert (place / "model.safetensors").stat().st_size == 2 * MIB
        assert "the model is NOT saved yet ([Errno 28] No space left on device): free 1 MiB in" in text
        assert "what was trained after step 9 is lost" in text
        assert len(moments) == 2
        assert sorted(path.name for path in disk.iterdir() if path.name.startswith("run")) == ["run"]


def _help(run: Path, answer: str, elsewhere: Path) -> tuple[str, set[float]]:
    """Waits for the plea, looks for signs of life, then helps."""
    text = wait_until(lambda: read_notice(run).text, "a plea")
    moments = set()
    for _ in range(2):
        time.sleep(0.3)
        position = read_position(run.parent.parent / "heartbeat")
        assert position is not None
        moments.add(position.time)
    save_to = run / "logs" / "save-to"
    if answer == "room":
        (run.parent / "rest").unlink()
    elif answer == "name":
        save_to.write_text(f"{elsewhere}\n")
    else:
        save_to.unlink()
        save_to.symlink_to(elsewhere)
    return text, moments


def test_another_error_than_lack_of_room_is_the_callers(tmp_path: Path) -> None:
    """Who has something else to keep gets it after one round; a file that has gone comes back for nobody."""
    places = []

    def fail(place: Path) -> None:
        places.append(place)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "tokenizer")

    run = _run(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        Keeper(run, Heartbeat(), spare=1).keep("the model", 1, fail, has_substitute=True)
    assert len(places) == len(set(places)) > 1


def test_what_no_space_would_mend_is_asked_for_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plea comes every half minute, however often there is another attempt."""
    monkeypatch.setattr("training.keeping._SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("training.keeping._SECONDS_BETWEEN_BLIND_ATTEMPTS", 0.05)
    run, pleas = _run(tmp_path / "run"), []

    def fail_at_first(place: Path) -> None:
        pleas.append(read_notice(run).text)
        if len(pleas) < 20:
            raise OSError(errno.EIO, "Input/output error")

    Keeper(run, Heartbeat(), spare=1).keep("the weights", 1, fail_at_first)
    assert "the weights is NOT saved yet ([Errno 5] Input/output error): mend this for" in pleas[-1]
    assert len({plea for plea in pleas if plea}) == 1


def test_a_fault_of_the_program_is_raised(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        raise ValueError("no such format")

    with pytest.raises(ValueError, match="no such format"):
        Keeper(_run(tmp_path / "run"), Heartbeat(), spare=1).keep("the model", 1, fail)


def test_room_is_looked_for_at_the_start(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 512, bias=False)  # 2 MiB; its checkpoints take 6 each
    with small_disk(tmp_path / "disk", "10m") as disk:
        config = run_config("ddp", 2, disk, micro_batch_size=4, optimizer="adamw", save_every="5", keep=1)
        assert require_room(config, disk, model, num_steps=6) is None
        warning = require_room(config, disk, model, num_steps=20)
        assert warning is not None
        assert "10.0 MiB are free" in warning
        assert "take about 15.1 MiB" in warning
        (disk / "rest").write_bytes(bytes(9 * MIB))
        with pytest.raises(OSError, match=r"1\.0 MiB are free, but the model takes 3\.1 MiB; make room"):
            require_room(config, disk, model, num_steps=20)


def test_no_training_begins_without_room_for_its_model(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        run = disk / "run"
        options = ("--task", "token-tagging", "--hidden-size", "400", "--max-steps", "1000000")
        done = lockstep("ddp", *options, "--output-dir", run)
        assert done.returncode == 1
        assert "MiB are free, but the model takes" in done.stderr
        assert json.loads((run / "record.json").read_text())["steps"] == []


def test_the_record_of_a_failed_run_has_its_warnings_and_failed_saves(tmp_path: Path) -> None:
    from launch.unfinished import record_end

    progress = ProgressLog(tmp_path, rank=0)
    progress.warn("beware")
    progress.write(SaveFailed(step=4, why="full"))
    record_end(run_config("ddp", 2, tmp_path, micro_batch_size=4), "failed", "why")
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["failed_saves"], record["warnings"]) == ([4], ["beware"])


def test_a_failed_checkpoint_ends_no_training_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    config = run_config("ddp", 2, tmp_path, micro_batch_size=4, save_every="1", on_save_error="stop")
    checkpoint = Checkpoint(CheckpointState.model_construct(config=config, step=4, best=None), {})
    saver = CheckpointSaver(config, tmp_path, ProgressLog(tmp_path, rank=0), Heartbeat(), keeps=True)
    saver.save(lambda: checkpoint)
    with pytest.raises(OSError, match="the checkpoint of step 4 cannot be saved"):
        saver.finish()
    saver.note_end_of_training()
    saver.save(lambda: checkpoint, wait=True)
    assert saver.failed_steps == [4, 4]


def test_a_notice_needs_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = _run(disk / "run")
        fill(disk)
        give_notice(run, read_notice(run)._replace(text="words"))
        assert read_notice(run).text == "words"


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], str]:
    """A run with files of the user's everywhere, their names, and what replacing it printed."""
    run = tmp_path_factory.mktemp("overwrite") / "run"
    options = ("--task", "token-tagging", "--max-steps", "4", "--save-every", "2", "--tracker", "tensorboard")
    options += ("--trace", "1")
    train("ddp", run, *options)
    names = {"notes.txt", "mine/rows.csv", "logs/note", "checkpoints/best.safetensors", "attempts/1/why", ".hidden"}
    names |= {"traces/step.png", "tensorboard/plot.png", "logs/torchrun/thoughts.md", "attempts/plan.md"}
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    (run / "attempts" / "1" / "logs").mkdir()
    (run / "attempts" / "1" / "logs" / "rank0.log").write_text("")
    (run / ".record.json.77").write_text("")
    for name in (".rank0.json.77.tmp", ".rank0.json.77", ".rank1.json.gz.77", ".rank0.backend.json.77"):
        (run / "traces" / name).write_text("")
    (run / "link").symlink_to(run / "mine")
    done = lockstep("single", *options[:2], "--max-steps", "1", "--overwrite", "--output-dir", run)
    assert done.returncode == 0, done.stderr
    return run, names | {"link"}, done.stdout


def test_overwriting_leaves_what_no_run_wrote(replaced: tuple[Path, set[str], str]) -> None:
    run, names, printed = replaced
    assert set(other_files(run)) == names
    for name in names - {"link"}:
        assert (run / name).read_text() == name
    assert f"kept {len(names)} files that no run wrote: .hidden, attempts/" in printed
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["best.safetensors"]
    assert not (run / ".record.json.77").exists()
    assert not (run / "attempts" / "1" / "logs").exists()
    assert json.loads((run / "record.json").read_text())["config"]["backend"] == "single"


def test_nothing_is_left_of_a_run_alone(replaced: tuple[Path, set[str], str]) -> None:
    run, names, _ = replaced
    for name in names:
        (run / name).unlink()
    for folder in ("mine", "attempts/1", "attempts"):
        (run / folder).rmdir()
    remove_run(run)
    assert not list(run.rglob("*"))


def test_a_removal_that_was_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "run")
    note_model_files(run, ["model.safetensors"])
    for name in ("model.safetensors", "record.json"):
        (run / name).write_text("")
    (run / "run.json").write_text("{}")
    removed: list[str] = []
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(path.name)
        remove(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        remove_run(run)
    monkeypatch.undo()
    assert (run / "run.json").exists()
    assert set(removed).isdisjoint({"run.json", "model-files.json"})
    remove_run(run)
    assert not list(run.rglob("*"))


def test_what_lies_behind_a_link_is_another_runs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    options = ("--task", "token-tagging", "--max-steps", "4")
    train("single", one, *options, "--save-every", "2")
    train("single", other, *options, "--save-every", "never")
    (other / "checkpoints").symlink_to(one / "checkpoints")
    done = lockstep("single", *options, "--overwrite", "--output-dir", other)
    assert done.returncode == 2
    assert f"--overwrite: {other}/checkpoints is a link, and --overwrite does not follow links" in done.stderr
    (one / "logs" / "torchrun").mkdir(exist_ok=True)
    (one / "logs" / "torchrun" / "stdout.log").touch()
    (other / "attempts" / "1").mkdir(parents=True)
    (other / "attempts" / "1" / "logs").symlink_to(one / "logs")
    remove_run(other)
    assert list_checkpoints(one)
    assert (one / "logs" / "torchrun" / "stdout.log").exists()


@pytest.mark.parametrize("save_every", ["never", "3"])
def test_a_directory_that_is_moved_away_costs_no_model(tmp_path: Path, save_every: str) -> None:
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--seconds", "0.3", "--max-steps", "8", "--save-every", save_every)
    with lasting_directory() as cache:
        job = start_lockstep("ddp", *options, "--output-dir", run, env={"LOCKSTEP_CACHE": str(cache)})
        wait_for_steps(run)
        run.rename(tmp_path / "elsewhere")
        _, errors = job.communicate(timeout=120)
        place = re.fullmatch(rf"lockstep: {run} was moved or removed after the training .* are in (.*)\n", errors)
        assert place is not None, errors
        assert job.returncode == 4
        assert (Path(place[1]) / "model.safetensors").exists()
        assert json.loads((Path(place[1]) / "record.json").read_text())["status"] == "completed"


def test_a_file_in_the_way_is_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    (tmp_path / "config.json").write_text("mine")
    note_model_files(tmp_path, ["model.safetensors"])
    with pytest.raises(UsageError, match=r"--output-dir here: holds config\.json, which no run wrote"):
        refuse_collisions("here", tmp_path, PATTERNS)
    note_model_files(tmp_path, ["config.json"])
    refuse_collisions("here", tmp_path, PATTERNS)
    (tmp_path / "logs").write_text("mine")
    with pytest.raises(UsageError, match="holds logs, which no run wrote"):
        refuse_collisions("here", tmp_path, PATTERNS)


def test_a_list_of_names_reaches_nothing_outside(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("")
    (run / "link").symlink_to(outside)
    names = ["../outside/precious", str(outside / "precious"), "link/precious", 7]
    (run / "model-files.json").write_text(json.dumps(names))
    assert [path.name for path in files_of_run(run)] == ["model-files.json"]
    remove_run(run)
    assert (outside / "precious").exists()


def test_without_names_and_record_nothing_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    assert model_files(tmp_path) == set()
    remove_run(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
