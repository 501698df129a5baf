"""A loss that is not finite ends the run with step, rank and samples, or leaves out the update, on all ranks alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import DISTRIBUTED, WHOLE, lockstep, require_backend, train
from training.plan import Plan

# Sixteen samples a step, eight a rank, in two micro-steps of four.
TASK = ("--task", "tests.faulty:NonFiniteTask", "--global-batch-size", "16", "--micro-batch-size", "4")
BAD_SAMPLE = 17


def _whereabouts(world_size: int) -> tuple[int, int, int]:
    """Step, rank and micro-step in which the bad sample comes up first."""
    plan = Plan(num_samples=44, global_batch_size=16, micro_batch_size=4, world_size=world_size, seed=42)
    for step, global_batch in enumerate(plan.epoch(0), start=1):
        for rank in range(world_size):
            for micro_step, micro_batch in enumerate(plan.micro_batches(global_batch, rank), start=1):
                if BAD_SAMPLE in micro_batch.sample_ids:
                    return step, rank, micro_step
    raise AssertionError


@pytest.mark.parametrize("backend", ["single", *DISTRIBUTED])
def test_it_stops_by_name(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    step, rank, micro_step = _whereabouts(1 if backend == "single" else 2)
    done = lockstep(backend, *TASK, "--save-every", "1", "--logging-steps", "1", "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    pattern = (
        rf"failed: rank {rank} \(.*\): FloatingPointError: the loss of step {step} is nan in micro-step {micro_step}"
    )
    assert re.search(pattern, done.stderr), done.stderr
    samples = re.search(r"training samples ([\d, ]+);", done.stderr)
    assert samples is not None
    assert str(BAD_SAMPLE) in samples[1].split(", ")
    assert len(samples[1].split(", ")) == 4
    assert len(done.stderr.splitlines()) == 2
    # No checkpoint has what the step made of the weights.
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*"))
    assert saved == [f"step-{number:08d}.safetensors" for number in range(1, step)]


@pytest.mark.parametrize("constant", [(), ("--bad-constant",)], ids=["nan", "infinite with a finite gradient"])
@pytest.mark.parametrize("backend", ["single", *DISTRIBUTED])
def test_it_leaves_the_update_out(tmp_path: Path, backend: str, constant: tuple[str, ...]) -> None:
    """All ranks skip the same steps; the rest goes on as if those steps had not been."""
    require_backend(backend)
    record = train(backend, tmp_path / "run", *TASK, *constant, "--on-nan", "skip", "--num-train-epochs", "2")
    skipped = [step["step"] for step in record["steps"] if step["skipped"]]
    assert len(skipped) == 2  # once an epoch
    assert [step["step"] for step in record["steps"] if step["loss"] is None] == skipped
    assert all(rank["schedule_steps"] == len(record["steps"]) - 2 for rank in record["ranks"])
    assert record["quality"]["loss"] is not None


def test_the_same_steps_everywhere(tmp_path: Path) -> None:
    weights = set()
    for backend in WHOLE:
        require_backend(backend)
        record = train(backend, tmp_path / backend, *TASK, "--on-nan", "skip", "--dtype", "float32")
        weights.add(record["ranks"][0]["weights_sha256"])
    assert len(weights) == 1


def test_an_overflow_under_fp16_is_none(tmp_path: Path) -> None:
    """The loss scaler skips and goes on: nothing to stop for."""
    options = ("--task", "token-tagging", "--dtype", "float32", "--precision", "fp16", "--init-loss-scale", "1e8")
    record = train("ddp", tmp_path / "run", *options, "--max-steps", "3")
    assert all(step["skipped"] for step in record["steps"])


def test_a_gradient_without_limit_stops_too(tmp_path: Path) -> None:
    """The weights of float32 overflow long before a loss does."""
    options = ("--task", "token-tagging", "--dtype", "float32", "--optimizer", "sgd", "--max-grad-norm", "0")
    done = lockstep("ddp", *options, "--learning-rate", "3e38", "--warmup-ratio", "0", "--output-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "is not finite" in done.stderr or "is nan" in done.stderr or "is inf" in done.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "failed"


def test_a_straggler_is_reported(tmp_path: Path) -> None:
    options = ("--task", "tests.faulty:SlowTask", "--seconds", "0.1", "--slow-rank", "1", "--max-steps", "10")
    done = lockstep("ddp", *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (straggler,) = json.loads((tmp_path / "run" / "record.json").read_text())["stragglers"]
    assert straggler["rank"] == 1
    assert straggler["times_slower"] > 2
    assert re.search(r"STRAGGLER\s+rank 1 \(\S+\) takes", done.stdout)
    record = train("ddp", tmp_path / "even", *options[:4], "--max-steps", "10")
    assert record["stragglers"] == []
