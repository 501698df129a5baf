"""Traces of steps: what is in them, that they change nothing, and what happens where they cannot be written."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from backends.single import SingleBackend
from launch.run_directory import restarted
from records.run_files import files_of_run
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.launching import (
    DISTRIBUTED,
    ending,
    fill,
    require_backend,
    run_config,
    small_disk,
    start_lockstep,
    train,
    wait_until,
)
from training.loop import Trainer
from training.trace import Tracer, steps_to_trace
from training.world import weights_digest
from watch.heartbeat import Heartbeat

OPTIONS = ("--task", "token-tagging", "--max-steps", "9")


def _events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(gzip.decompress(path.read_bytes()))
    events: list[dict[str, Any]] = content["traceEvents"] if isinstance(content, dict) else content
    return events


def _ranges(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Beginning and end of each named range, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in _events(path):
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def _trainer(directory: Path, **options: Any) -> Trainer:
    """Two steps an epoch, two epochs."""
    task = TokenTagging(TokenTaggingSettings())
    task.prepare()
    config = run_config("single", 1, directory, **{"micro_batch_size": 32, **options})
    return Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))


@pytest.mark.parametrize(
    ("count", "after", "num_steps", "steps"),
    [
        (2, 0, 100, [6, 7]),
        (2, 40, 100, [46, 47]),
        (2, 0, 6, [5, 6]),
        (4, 0, 6, [3, 4, 5, 6]),
        (6, 0, 6, [1, 2, 3, 4, 5, 6]),
        (100, 0, 3, [1, 2, 3]),
        (2, 99, 100, [100]),
        (2, 100, 100, []),
    ],
)
def test_which_steps_are_traced(count: int, after: int, num_steps: int, steps: list[int]) -> None:
    assert list(steps_to_trace(count, after=after, num_steps=num_steps)) == steps


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_each_rank_leaves_a_trace(tmp_path: Path, backend: str) -> None:
    """With a range for each step and each of its phases; the training is the same as without."""
    require_backend(backend)
    run = tmp_path / "run"
    record = train(backend, run, *OPTIONS, "--trace", "2", "--micro-batch-size", "8")
    files = [name for rank in record["ranks"] for name in rank["trace"]["files"]]
    assert sorted(path.relative_to(run).as_posix() for path in run.glob("traces/*")) == sorted(files)
    assert not list(run.glob("traces/.*"))
    for rank in record["ranks"]:
        assert rank["trace"]["steps"] == [6, 7]
        assert rank["trace"]["error"] is None
        ranges = _ranges(run / f"traces/rank{rank['rank']}.json.gz")
        for step, micro_steps in {6: 1, 7: 2}.items():  # an epoch ends with a short batch
            ((begin, end),) = ranges[f"step {step}"]
            for phase in ("data", "forward", "backward", "update"):
                times = 1 if phase == "update" else micro_steps
                assert sum(begin <= first and last <= end for first, last in ranges[phase]) == times
        assert not {"step 5", "step 8"} & ranges.keys()
    assert all(_events(run / name) for name in files)
    assert record["ranks"][0]["memory"]["activation_bytes"] > 0
    plain = train(backend, tmp_path / "plain", *OPTIONS, "--micro-batch-size", "8")
    assert plain["steps"] == record["steps"]
    assert plain["ranks"][0]["weights_sha256"] == record["ranks"][0]["weights_sha256"]
    assert plain["ranks"][0]["trace"] is None
    assert not (tmp_path / "plain" / "traces").exists()


def test_the_timeline_of_a_library_lies_beside_the_trace(tmp_path: Path) -> None:
    require_backend("horovod")
    run = tmp_path / "run"
    record = train("horovod", run, *OPTIONS, "--trace", "2")
    assert record["ranks"][0]["trace"]["files"] == ["traces/rank0.json.gz", "traces/rank0.backend.json.gz"]
    assert record["ranks"][1]["trace"]["files"] == ["traces/rank1.json.gz"]
    events = _events(run / "traces/rank0.backend.json.gz")
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    reduced = [names[event["pid"]] for event in events if event.get("name") == "ALLREDUCE"]
    weights = {"embedding.weight", "mixer.weight", "mixer.bias", "output.bias"}
    assert {name: reduced.count(f"allreduce.{name}") for name in weights} == dict.fromkeys(weights, 2)


def test_a_run_shorter_than_its_trace(tmp_path: Path) -> None:
    record = train("single", tmp_path / "run", "--task", "token-tagging", "--max-steps", "3", "--trace", "100")
    assert record["ranks"][0]["trace"]["steps"] == [1, 2, 3]


def test_a_training_that_ends_before_its_trace_leaves_what_there_is(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, trace=4)
    tracer = Tracer(trainer, tmp_path, Heartbeat())
    trainer.observe(tracer)
    trainer.train_epoch(0, 0)
    assert tracer.record().files == []
    tracer.finish()
    assert tracer.record().steps == [1, 2]
    assert set(_ranges(tmp_path / "traces/rank0.json.gz")) >= {"step 1", "step 2"}


def _traced(directory: Path) -> tuple[Trainer, Tracer]:
    trainer = _trainer(directory, trace=2)
    tracer = Tracer(trainer, directory, Heartbeat())
    trainer.observe(tracer)
    trainer.train()
    tracer.finish()
    return trainer, tracer


def test_a_trace_without_room_does_not_end_the_training(tmp_path: Path) -> None:
    """Neither where the disk is full, nor where there can be no folder; nothing is left of the trace."""
    (tmp_path / "run").mkdir()
    with small_disk(tmp_path / "run" / "traces", "64k") as traces:
        fill(traces)
        trainer, tracer = _traced(tmp_path / "run")
        assert [path.name for path in traces.iterdir()] == ["rest"]
    assert tracer.record().files == []
    assert tracer.error is not None
    assert "could NOT be saved: it was not written to its end; is the disk full?" in tracer.error
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "traces").write_text("")
    other, blocked = _traced(tmp_path / "other")
    assert blocked.error is not None
    assert "could NOT be saved: [Errno 20] Not a directory" in blocked.error
    plain = _trainer(tmp_path)
    plain.train()
    assert len({weights_digest(one.state.module) for one in (trainer, other, plain)}) == 1


def test_a_trace_that_is_cut_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "training.trace.profile.export_chrome_trace", lambda self, path: Path(path).write_text('{"traceEvents": [{}')
    )
    _, tracer = _traced(tmp_path)
    assert tracer.error is not None
    assert list((tmp_path / "traces").iterdir()) == []


def test_the_trace_of_an_earlier_start_is_set_aside(tmp_path: Path) -> None:
    config = run_config("single", 1, tmp_path, micro_batch_size=32, trace=1)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    for folder in ("logs", "traces"):
        (tmp_path / folder).mkdir()
    (tmp_path / "traces" / "rank0.json.gz").write_text("")
    restarted(config)
    assert not (tmp_path / "traces").exists()
    assert tmp_path / "attempts/1/traces/rank0.json.gz" in set(files_of_run(tmp_path))


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_its_trace_and_a_resumed_one_sets_it_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--task", "tests.faulty:SlowTask", "--max-steps", "40", "--trace", "30")
    with ending(start_lockstep("ddp", *options, "--output-dir", run)) as job:
        wait_until(lambda: (run / "traces").exists(), "the beginning of the trace")
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=180)
    assert job.returncode == 75, errors
    for rank in range(2):
        assert "step 6" in _ranges(run / f"traces/rank{rank}.json.gz")
    record = train("ddp", run, "--task", "tests.faulty:SlowTask", "--resume")
    assert [rank["trace"] for rank in record["ranks"]] == [None, None]
    assert not (run / "traces").exists()
    assert "step 6" in _ranges(run / "attempts/1/traces/rank0.json.gz")
