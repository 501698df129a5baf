"""A watched training: the same weights, and what it says of its steps. Trackers: the same under every backend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from backends.registry import find_backend
from tests.forked.client import forked_lockstep
from tests.launching import DISTRIBUTED, in_a_network_of_its_own, lockstep, require_backend, train
from tests.sparing import in_ci

# The traffic of other programs on the same interface cannot be told from a run's own.
ALONE = os.geteuid() == 0 and shutil.which("ip") is not None

NUM_STEPS = 4
OPTIONS = ["--model", "bert-tiny", "--max-steps", str(NUM_STEPS), "--threads-per-rank", "1", "--micro-batch-size", "8"]
OPTIONS += ["--precision", "bf16", "--no-evaluate"]


@pytest.fixture(scope="module", params=in_ci(["ddp", "fsdp2", "horovod"], DISTRIBUTED))
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_backend(request.param)
    directory = tmp_path_factory.mktemp("watched") / "run"
    command = [*forked_lockstep(), request.param, "--output-dir", str(directory), *OPTIONS, "--diagnose"]
    if ALONE:
        command = in_a_network_of_its_own(*command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads((directory / "record.json").read_text())
    return record


@pytest.mark.slow
def test_watching_changes_no_weight(watched: dict[str, Any], tmp_path: Path) -> None:
    plain = train(watched["config"]["backend"], tmp_path / "run", *OPTIONS)
    assert plain["ranks"][0]["weights_sha256"] == watched["ranks"][0]["weights_sha256"]
    assert plain["steps"] == watched["steps"]
    assert plain["ranks"][0]["diagnosis"] is None


@pytest.mark.slow
def test_what_a_step_communicates_is_counted(watched: dict[str, Any]) -> None:
    seen = watched["ranks"][0]["diagnosis"]
    elements = seen["gradient_bytes"] // 4
    # On two ranks a ring sends every gradient once; headers come on top.
    assert min(seen["sent_bytes"]) >= 2 * seen["gradient_bytes"]
    if find_backend(watched["config"]["backend"]).capabilities.shards_weights:
        # Rows are filled up. Weights are gathered for the forward pass, and those of layers for the backward pass, too.
        for step in seen["reductions"]:
            assert elements <= step["reduce_scatter_base"] < 1.1 * elements
            assert elements <= step["allgather_base"] < 2.2 * elements
        return
    assert all(step["allreduce"] == elements for step in seen["reductions"])
    if ALONE:
        # Horovod's ranks keep in touch while they load the first batch, which may take seconds.
        assert max(seen["sent_bytes"][1:]) < 2.1 * seen["gradient_bytes"]
    assert watched["ranks"][1]["diagnosis"]["sent_bytes"] is None
    assert seen["inner_dtype"] == "bfloat16"


@pytest.mark.slow
def test_every_step_is_timed_and_fingerprinted(watched: dict[str, Any]) -> None:
    for rank in watched["ranks"]:
        seen = rank["diagnosis"]
        for seconds in (
            seen["whole_seconds"],
            seen["data_seconds"],
            seen["first_seconds"],
            seen["rehearsed_seconds"],
            *seen["alone_seconds"].values(),
        ):
            assert len(seconds) == NUM_STEPS
            assert min(seconds) > 0
    seen = watched["ranks"][0]["diagnosis"]
    assert len(seen["digests"]) == len(seen["sketches"]) == NUM_STEPS + 1
    assert all(len(digests) == len(seen["parameters"]) for digests in seen["digests"])
    # The first step of a warm-up has no learning rate yet.
    assert seen["digests"][1] == seen["digests"][0]
    changed = [before != after for before, after in zip(seen["digests"][1], seen["digests"][2], strict=True)]
    assert all(changed)


def test_a_compiled_model_cannot_be_watched() -> None:
    done = lockstep("ddp", "--diagnose", "--torch-compile")
    assert done.returncode == 2
    assert "--torch-compile" in done.stderr


@pytest.mark.slow
def test_event_files_say_the_same_under_every_backend(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = {}
    for name in DISTRIBUTED:
        require_backend(name)
        directory = tmp_path / name
        record = train(name, directory, "--task", "token-tagging", "--max-steps", "12", "--tracker", "tensorboard")
        events = EventAccumulator(str(directory / "tensorboard")).Reload()
        seen[name] = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
        assert [step for step, _ in seen[name]["train/loss"]] == list(range(1, 13))
        losses = [step["loss"] for step in record["steps"]]
        assert [value for _, value in seen[name]["train/loss"]] == pytest.approx(losses, rel=1e-6)
        assert set(seen[name]) >= {"train/grad_norm", "train/learning_rate"}
        assert any(tag.startswith("validation/") for tag in seen[name])
    assert len({str(scalars) for scalars in seen.values()}) == 1


def test_an_unknown_tracker_is_refused() -> None:
    done = lockstep("ddp", "--tracker", "chalkboard")
    assert done.returncode == 2
    assert "--tracker chalkboard" in done.stderr
