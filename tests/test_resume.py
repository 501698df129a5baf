"""A run that stops anywhere and goes on, under whatever backend, goes the way of the unbroken one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contract.patience import stretched
from launch.errors import UsageError
from launch.resume import Finished, Start, check_same_trajectory, find_start
from records.checkpoint import CheckpointState, checkpoint_path, checkpoint_step, list_checkpoints, read_checkpoint
from records.config import RunOptions
from records.record import EvaluationRecord, by_merit
from tasks.token_tagging import TokenTaggingSettings
from tests.launching import (
    DISTRIBUTED,
    LOCKSTEP,
    ending,
    fill,
    lasting_directory,
    lockstep,
    require_backend,
    run_config,
    small_disk,
    start_lockstep,
    train,
    wait_for_steps,
    wait_until,
)

# Two steps an epoch, the second one short; every step is saved.
RUN = ("--task", "token-tagging", "--num-train-epochs", "3", "--save-every", "1", "--keep", "100")
NUM_STEPS = 6
EXACT = ("--dtype", "float32", "--dropout", "0.1", "--num-processes", "2", "--micro-batch-size", "8")
SAME_BITS = {
    "fp32": EXACT,
    "bf16": (*EXACT, "--precision", "bf16"),
    # So large a scale overflows at first: some of the steps are skipped.
    "fp16": (*EXACT, "--precision", "fp16", "--init-loss-scale", "262144"),
}
STOP_POINTS = [("ddp", "fp16"), ("horovod", "fp16"), ("accelerate", "bf16"), ("single", "fp16")]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def _assert_same_run(run: Path, unbroken: Path, *, stopped_after: int = 0) -> None:
    """All later weights, losses, learning rates, skips and metrics are the same bits.

    A checkpoint of a run that was asked to stop leaves the evaluation that was due to the run that goes on.
    """
    ours, theirs = (json.loads((one / "record.json").read_text()) for one in (run, unbroken))
    assert ours["steps"] == theirs["steps"]
    for name in ("step", "epoch", "metrics"):
        assert [one[name] for one in ours["evaluations"]] == [one[name] for one in theirs["evaluations"]]
    assert ours["quality"] == theirs["quality"]
    assert [rank["weights_sha256"] for rank in ours["ranks"]] == [rank["weights_sha256"] for rank in theirs["ranks"]]
    assert (run / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
    for path in list_checkpoints(run):
        step = checkpoint_step(path)
        one, other = (read_checkpoint(checkpoint_path(place, step)) for place in (run, unbroken))
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert tensor.numpy().tobytes() == other.tensors[name].numpy().tobytes(), (step, name)
        hidden = {"config", "evaluations", *(["evaluated_step"] if step == stopped_after else [])}
        assert one.state.model_dump(exclude=hidden) == other.state.model_dump(exclude=hidden)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Unbroken runs, made once, by backend and options."""
    made: dict[Any, Path] = {}

    def run(backend: str, *options: str) -> Path:
        require_backend(backend)
        if (backend, options) not in made:
            made[backend, options] = tmp_path_factory.mktemp("unbroken") / backend
            # Of an option that is given twice, the last one counts.
            train(backend, made[backend, options], *RUN, *options)
        return made[backend, options]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "precision"), STOP_POINTS, ids=lambda value: value)
def test_every_stop_point(tmp_path: Path, unbroken: Any, backend: str, precision: str) -> None:
    options = [o for o in SAME_BITS[precision] if backend != "single" or o not in ("--num-processes", "2")]
    whole = unbroken(backend, *options)
    steps = json.loads((whole / "record.json").read_text())["steps"]
    assert any(step["skipped"] for step in steps) == (precision == "fp16")
    assert not all(step["skipped"] for step in steps)
    for step in range(1, NUM_STEPS):
        run = tmp_path / str(step)
        record = train(backend, run, "--resume", checkpoint_path(whole, step))
        assert record["resumed_from"]["step"] == step
        assert all(len(rank["step_seconds"]) == NUM_STEPS - step for rank in record["ranks"])
        _assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "accelerate"])
def test_four_ranks(tmp_path: Path, unbroken: Any, backend: str) -> None:
    """Where the order of a sum matters, and with it how a library lays out what it reduces."""
    whole = unbroken(backend, *EXACT[:4], "--num-processes", "4")
    for step in (1, 4):
        train(backend, tmp_path / str(step), "--resume", checkpoint_path(whole, step))
        _assert_same_run(tmp_path / str(step), whole)


@pytest.mark.parametrize("saved_by", DISTRIBUTED)
@pytest.mark.parametrize("resumed_by", DISTRIBUTED)
def test_from_any_backend_to_any(tmp_path: Path, unbroken: Any, saved_by: str, resumed_by: str) -> None:
    """In float32, at two ranks: the same bits, in the middle of the second epoch."""
    whole = unbroken(saved_by, *EXACT)
    record = train(resumed_by, tmp_path / "run", "--resume", checkpoint_path(whole, 3))
    assert record["config"]["backend"] == resumed_by
    assert record["resumed_from"]["backend"] == saved_by
    _assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", ("--num-processes", "2", "--micro-batch-size", "4")),
        ("ddp", ("--num-processes", "4")),
        ("ddp", ("--num-processes", "1")),
        ("horovod", ("--num-processes", "4", "--micro-batch-size", "4")),
        ("accelerate", ("--num-processes", "1", "--micro-batch-size", "8")),
        ("single", ("--num-processes", "1")),
        ("single", ("--num-processes", "1", "--micro-batch-size", "8")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[1::2]),
)
def test_in_another_world_or_split(tmp_path: Path, unbroken: Any, backend: str, options: tuple[str, ...]) -> None:
    """To the rounding of float64: the same samples enter the same steps."""
    require_backend(backend)
    whole = unbroken("ddp", "--num-processes", "2")
    record = train(backend, tmp_path / "run", "--resume", checkpoint_path(whole, 3), *options)
    assert record["resumed_from"] | {"checkpoint": ""} == {
        "checkpoint": "",
        "step": 3,
        "backend": "ddp",
        "num_processes": 2,
    }
    theirs = json.loads((whole / "record.json").read_text())
    for one, other in zip(record["steps"], theirs["steps"], strict=True):
        assert one["num_samples"] == other["num_samples"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
    for name, weight in _weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, _weights(whole)[name], rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_bert(tmp_path: Path, backend: str) -> None:
    """The real model, with dropout and accumulation."""
    require_backend(backend)
    options = ("--model", "bert-tiny", "--max-seq-length", "32", "--dropout", "0.1", "--max-steps", "6")
    options = (*options, "--num-processes", "2", "--micro-batch-size", "8", "--save-every", "2")
    train(backend, tmp_path / "whole", *options)
    start = checkpoint_path(tmp_path / "whole", 4)
    train(backend, tmp_path / "run", "--resume", start)
    _assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=lambda number: number.name
)
@pytest.mark.parametrize("backend", ["single", *DISTRIBUTED])
def test_asked_to_stop_it_saves_and_goes_on(
    tmp_path: Path, unbroken: Any, backend: str, number: signal.Signals
) -> None:
    require_backend(backend)
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:HeldTask", "--max-steps", "12", "--dropout", "0.1", "--keep", "100")
    job = start_lockstep(backend, *options, "--until", run / "logs" / "stop", "--output-dir", run)
    wait_for_steps(run)
    job.send_signal(number)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 75, stderr
    (saved,) = list_checkpoints(run)
    step = checkpoint_step(saved)
    assert stderr.splitlines() == [
        f"lockstep: {number.name}: finishing the step and saving; again ends it at once",
        f"lockstep: stopped after step {step}; --resume goes on from there",
    ]
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "interrupted"
    assert [one["step"] for one in record["steps"]] == list(range(1, step + 1))
    done = lockstep(backend, "--task", options[1], "--until", "/", "--resume", "--output-dir", run)
    assert done.returncode == 0, done.stderr
    assert f"going on after step {step}, from {saved}" in done.stdout
    assert sorted(path.name for path in (run / "attempts" / "1").iterdir()) == [
        "logs", "progress.jsonl", "record.json", "run.json"
    ]  # fmt: skip
    _assert_same_run(run, unbroken(backend, *options), stopped_after=step)


@pytest.mark.slow
@pytest.mark.launchers
@pytest.mark.parametrize("save_every", ["500", "never"])
def test_asked_twice_it_ends_at_once(tmp_path: Path, save_every: str) -> None:
    """And the first time, where it is not to save anything."""
    run = tmp_path / "run"
    command = [str(LOCKSTEP), "ddp", "--task", "tests.faulty:SlowTask", "--seconds", "5", "--output-dir", str(run)]
    command += ["--save-every", save_every]
    with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as job:
        wait_for_steps(run, job=job)
        if save_every != "never":
            job.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, stderr = job.communicate(timeout=180)
    assert time.monotonic() - began < stretched(12)
    assert job.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == "lockstep: interrupted by SIGTERM; all ranks have been ended"
    assert json.loads((run / "record.json").read_text())["status"] == "interrupted"
    assert not list_checkpoints(run)


@pytest.fixture
def interrupted(tmp_path: Path, unbroken: Any) -> Path:
    """A run that was lost after its fifth step, whose checkpoint was not on the disk yet."""
    run = tmp_path / "run"
    shutil.copytree(unbroken("ddp", *EXACT), run)
    (run / "record.json").unlink()
    checkpoint_path(run, 5).unlink()
    return run


def test_a_damaged_latest_falls_back(tmp_path: Path, interrupted: Path, unbroken: Any) -> None:
    newest = checkpoint_path(interrupted, 4)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    done = lockstep("ddp", "--resume", "latest", "--output-dir", interrupted)
    assert done.returncode == 0, done.stderr
    assert f"passed over: {newest}: is damaged, its content does not match its hash" in done.stdout
    assert "going on after step 3" in done.stdout
    _assert_same_run(interrupted, unbroken("ddp", *EXACT))
    assert (interrupted / "attempts" / "1" / newest.name).exists()
    # By its own name, it is refused.
    damaged = interrupted / "attempts" / "1" / newest.name
    done = lockstep("ddp", "--resume", damaged, "--output-dir", tmp_path / "other")
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockstep: --resume {damaged}: is damaged")
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_resumed(tmp_path: Path, interrupted: Path, unbroken: Any) -> None:
    whole, new = unbroken("ddp", *EXACT), tmp_path / "new"
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    empty = tmp_path / "empty"
    empty.mkdir()
    start = checkpoint_path(interrupted, 3)
    cases = {
        ("--resume",): "--resume latest: tell of which run, with --output-dir",
        ("--resume", tmp_path / "none"): "there is no such file",
        ("--resume", empty): "holds no checkpoint",
        ("--resume", whole / "model.safetensors"): "is a safetensors file, but no checkpoint",
        ("--resume", whole / "record.json"): "is torn or no safetensors file",
        ("--resume", checkpoint_path(whole, 3), "--output-dir", whole): "its run is complete; there is nothing to",
        ("--resume", start, "--seed", "7"): "--seed 7: the run to resume has 42",
        ("--resume", start, "--dropout", "0.2"): "--dropout 0.2: the run to resume has 0.1",
        ("--resume", start, "--task", "text-classification"): "--task text-classification: the run to resume has",
        ("--resume", start, "--precision", "bf16"): "--precision bf16: the run to resume has fp32",
        ("--resume", start, "--num-processes", "3"): "--global-batch-size 32 does not divide",
        ("--resume", start, "--overwrite", "--output-dir", interrupted): "--overwrite would remove the checkpoint",
        ("--resume", start, "--diagnose"): "--diagnose watches whole runs",
        ("--resume", start, "--output-dir", whole): "holds a run already",
    }
    for arguments, message in cases.items():
        place = () if "--output-dir" in arguments or arguments == ("--resume",) else ("--output-dir", new)
        done = lockstep("ddp", *arguments, *place, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stdout)
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not new.exists()
    assert {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")} == before


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default(tmp_path: Path) -> None:
    config = run_config("ddp", 2, tmp_path, micro_batch_size=16, task_settings={"dropout": 0.1})
    options = RunOptions.model_validate(config.model_dump(include={*RunOptions.model_fields}))
    start = Start(tmp_path, CheckpointState.model_construct(config=config))
    check_same_trajectory(start, options, TokenTaggingSettings(dropout=0.1))
    with pytest.raises(UsageError, match="--hidden-size 13: the run to resume has 12"):
        check_same_trajectory(start, options, TokenTaggingSettings(dropout=0.1, hidden_size=13))
    with pytest.raises(UsageError, match=r"--dropout 0.0: the run to resume has 0.1"):
        check_same_trajectory(start, options, TokenTaggingSettings())


@pytest.mark.slow
def test_other_data_are_noticed(tmp_path: Path) -> None:
    """The file that was trained on has changed."""
    rows, run = tmp_path / "rows.csv", tmp_path / "run"
    text = "text,label\n" + "".join(f"some words {n},{n % 2}\n" for n in range(40))
    rows.write_text(text)
    options = ("--train-file", rows, "--validation-file", rows, "--max-seq-length", "16", "--model", "bert-tiny")
    train("single", run, *options, "--max-steps", "4", "--save-every", "2")
    rows.write_text(text.replace("some", "other"))
    done = lockstep("single", "--resume", checkpoint_path(run, 2), "--output-dir", tmp_path / "on")
    assert done.returncode == 1
    assert "the data or the model is not that of the checkpoint" in done.stderr


@pytest.mark.slow
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start_lockstep("ddp", "--task", "tests.faulty:SlowTask", "--save-every", "1", "--output-dir", run)
    wait_for_steps(run)
    done = lockstep("ddp", "--resume", "--output-dir", run)
    assert done.returncode == 2
    assert "its run is still going on (rank 0 is process" in done.stderr
    job.terminate()
    assert job.wait(timeout=180) == 75


@pytest.mark.slow
def test_latest_of_a_complete_run_is_done(unbroken: Any) -> None:
    """A queue that starts the same command once more wants no error."""
    whole = unbroken("ddp", *EXACT)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    done = lockstep("ddp", *RUN, "--resume", "latest", "--output-dir", whole)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the run in {whole} is complete; there is nothing to resume\n"
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_latest_of_nothing_begins(tmp_path: Path) -> None:
    """The same command starts a job and goes on with it, as a queue that starts jobs again needs."""
    options = ("--task", "token-tagging", "--max-steps", "2", "--resume", "latest", "--output-dir", tmp_path / "run")
    done = lockstep("single", *options)
    assert done.returncode == 0, done.stderr
    assert "no checkpoint yet: starting from the beginning" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_the_best_model_is_kept_and_patience_ends(tmp_path: Path, unbroken: Any, metric: str) -> None:
    """With a run that is broken after the best evaluation and before the end."""
    run, on = tmp_path / "run", tmp_path / "on"
    options = (*RUN, "--learning-rate", "0.5", "--num-train-epochs", "12", "--keep", "2", "--save-every", "3")
    options = (*options, "--metric-for-best-model", metric, "--early-stopping-patience", "2")
    record = train("ddp", run, *options)
    values = [one["metrics"][metric] for one in record["evaluations"]]
    assert len(values) < 12
    best = values.index((max if metric == "accuracy" else min)(values))
    assert len(values) == best + 1 + 2
    assert record["best_step"] == record["evaluations"][best]["step"]
    assert record["quality"] == record["evaluations"][best]["metrics"]
    kept = read_checkpoint(checkpoint_path(run, record["best_step"]))
    for name, weight in _weights(run).items():
        assert torch.equal(weight, kept.tensors[f"model.{name}"])
    assert kept.state.best is not None
    assert kept.state.best.step == record["best_step"]
    later = [path for path in list_checkpoints(run) if checkpoint_step(path) > record["best_step"]]
    assert later
    resumed = train("horovod", on, "--resume", later[-1])
    assert [one["metrics"] for one in resumed["evaluations"]] == [one["metrics"] for one in record["evaluations"]]
    assert resumed["best_step"] == record["best_step"]
    assert (on / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_best_model_is_lost(tmp_path: Path) -> None:
    """The next best is kept, and the summary says so; a lone checkpoint can be gone on from, too."""
    run = tmp_path / "run"
    options = (*RUN, "--num-train-epochs", "6", "--learning-rate", "0.5", "--metric-for-best-model", "accuracy")
    record = train("single", run, *options)
    ranking = by_merit([EvaluationRecord.model_validate(one) for one in record["evaluations"]], "accuracy")
    best = checkpoint_path(run, record["best_step"])
    assert checkpoint_step(best) == ranking[0].step
    start = checkpoint_path(run, max(step for step in range(1, 12) if step != record["best_step"]))
    content = bytearray(best.read_bytes())
    content[-1] ^= 1
    best.write_bytes(content)
    done = lockstep("single", "--resume", start, "--output-dir", tmp_path / "damaged")
    lone = shutil.copyfile(start, tmp_path / start.name)
    alone = lockstep("single", "--resume", lone, "--output-dir", tmp_path / "alone")
    assert done.returncode == alone.returncode == 0, done.stderr + alone.stderr
    assert f"the best model so far is not there ({best.parent.parent.parent / best.name})" in alone.stdout
    for place, printed in (("damaged", done.stdout), ("alone", alone.stdout)):
        went_on = json.loads((tmp_path / place / "record.json").read_text())
        assert went_on["best_step"] not in (None, ranking[0].step)
        assert f"NOT BEST  the weights of step {ranking[0].step}, which were better, have been lost" in printed
        (rated,) = [one for one in went_on["evaluations"] if one["step"] == went_on["best_step"]]
        assert went_on["quality"] == rated["metrics"]


@pytest.mark.slow
def test_the_record_of_a_run_stopped_twice_has_its_past(tmp_path: Path) -> None:
    run, last = tmp_path / "run", 0
    options = ("--task", "tests.faulty:SlowTask", "--max-steps", "60", "--output-dir", str(run))
    for more in ((), ("--resume",)):
        job = start_lockstep("ddp", *options, *more)
        if more:
            wait_until((run / "attempts").exists, "the start that goes on")
        wait_for_steps(run)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=180) == 75
        record = json.loads((run / "record.json").read_text())
        assert [one["step"] for one in record["steps"]] == list(range(1, len(record["steps"]) + 1))
        assert len(record["steps"]) > last
        assert (record["resumed_from"] or {"step": 0})["step"] == last
        last = len(record["steps"])


@pytest.mark.slow
def test_threads_are_kept(tmp_path: Path) -> None:
    """The order of sums depends on them."""
    run = tmp_path / "run"
    options = ("--task", "token-tagging", "--dtype", "float32", "--max-steps", "4", "--save-every", "2")
    train("single", run, *options, "--threads-per-rank", "1")
    start = checkpoint_path(run, 2)
    assert train("single", tmp_path / "kept", "--resume", start)["ranks"][0]["num_threads"] == 1
    done = lockstep("single", "--resume", start, "--threads-per-rank", "2", "--output-dir", tmp_path / "other")
    assert done.returncode == 0
    assert "--threads-per-rank 2, where it had 1: the same to rounding, not to the last bit" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logs/rank0.pid", "logs/rankx.pid", "attempts/1-old/record.json"])
def test_odd_things_in_a_directory_are_no_matter(tmp_path: Path, interrupted: Path, name: str) -> None:
    path = interrupted / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    done = lockstep("ddp", "--resume", "--output-dir", interrupted)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_metric_that_is_not_computed(tmp_path: Path) -> None:
    done = lockstep("single", *RUN, "--metric-for-best-model", "bleu", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "--metric-for-best-model bleu: the task computes loss, accuracy, macro_f1; choose one" in done.stderr
    assert not (tmp_path / "run").exists()


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
    train("ddp", tmp_path / "run", *options, "--save-every", "0.05min")
    steps = [checkpoint_step(path) for path in list_checkpoints(tmp_path / "run")]
    assert 1 <= len(steps) <= 3


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
            assert _weights(run)
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
        assert _weights(run)
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
        assert f"lockstep: not all results could be saved in {run}; the others are in {place}\n" in errors
        assert "MODEL IN" in printed
        assert f"could NOT be saved in {run} (" in printed
        assert f"it is in {place}\n" in printed
        record = json.loads((place / "record.json").read_text())
        assert record["status"] == "completed"
        assert record["model_directory"] == str(place)
        assert _weights(place)
        assert not (run / "record.json").exists()
        with pytest.raises(Finished, match="there is nothing to resume"):
            find_start("latest", run)
        assert not [*run.glob(".record*"), *place.glob(".record*")]


@pytest.mark.slow
def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """Ctrl-C ends the other end of a pipe, too; the run still saves."""
    run = tmp_path / "run"
    command = [str(LOCKSTEP), "ddp", "--task", "tests.faulty:SlowTask", "--max-steps", "60", "--output-dir", str(run)]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as job:
        wait_for_steps(run, job=job)
        assert job.stdout is not None
        job.stdout.close()
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=180) == 75
    assert list_checkpoints(run)
