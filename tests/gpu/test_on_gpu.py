"""What only a GPU can show. On a machine without one, all of it is skipped by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.devices import count_gpus
from backends.registry import BACKENDS
from backends.single import SingleBackend
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings
from tests.gpu.contracts import ADAPTERS, NUM_PROCESSES, more_options, unavailable_reason
from tests.launching import lockstep, run_config, train
from training.loop import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="no GPU is visible here")]

ON_GPU = [
    (name, precision) for name, row in BACKENDS.items() for precision in row.capabilities.precisions.get("cuda", ())
]
SHARING = [name for name, row in BACKENDS.items() if row.capabilities.ranks_may_share_gpu]
SHORT = ("--device", "cuda", "--max-steps", "20", "--logging-steps", "5")


def _require(name: str) -> None:
    reason = unavailable_reason(name)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_contract_is_kept(adapter: str) -> None:
    _require(adapter)
    done = lockstep("contract", adapter, "--device", "cuda", "--num-processes", NUM_PROCESSES, *more_options(adapter))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "precision"), ON_GPU)
def test_one_rank_trains_bert_over_nccl(tmp_path: Path, name: str, precision: str) -> None:
    _require(name)
    arguments = [*SHORT, "--num-processes", "1", "--precision", precision]
    if "torchrun" in BACKENDS[name].capabilities.start_methods:  # accelerate launch makes no group of one
        arguments += ["--start-method", "torchrun"]
    rank = train(name, tmp_path / "run", *arguments)["ranks"][0]
    assert rank["device"].startswith("cuda")
    assert rank["peak_cuda_memory_bytes"] > 0
    assert rank["effective_settings"]["transport"] == ("none" if name == "single" else "nccl")


@pytest.mark.parametrize("batching", ["packed", "sorted", "padded"])
@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.0), ("bf16", 0.0), ("bf16", 0.1)])
def test_no_step_waits_for_the_gpu(tmp_path: Path, precision: str, dropout: float, batching: str) -> None:
    """Whatever waits for the GPU is an error from the second step on; the first one compiles and allocates."""
    task = TextClassification(TextClassificationSettings(vocab_size=1000, dropout=dropout))
    task.prepare()
    settled: dict[str, Any] = {"global_batch_size": 32, "micro_batch_size": 16, "max_grad_norm": 1.0}
    settled |= {"task": "text-classification", "device": "cuda", "precision": precision, "optimizer": "adamw"}
    config = run_config("single", 1, tmp_path, batching=batching, **settled)
    trainer = Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))
    global_batches = trainer.plan.epoch(0)[:4]
    batches = trainer.loader.load(global_batches)
    trainer.train_step(0, global_batches[0], batches)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for global_batch in global_batches[1:]:
            trainer.train_step(0, global_batch, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_trace_shows_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    """And the record says what activations took, and how much energy the GPU used or why that is not known."""
    (rank,) = train("single", tmp_path / "run", *SHORT, "--trace", "2")["ranks"]
    events = json.loads(gzip.decompress((tmp_path / "run" / "traces" / "rank0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert rank["memory"]["activation_bytes"] > 0
    assert (rank["energy"]["gpu_joules"] is None) != (rank["energy"]["why_no_gpu_joules"] is None)


def _two_sharing(name: str, output_dir: Path, *arguments: str) -> dict[str, Any]:
    _require(name)
    record = train(name, output_dir, *SHORT, "--num-processes", "2", *arguments)
    if count_gpus() == 1:
        assert {rank["effective_settings"]["transport"] for rank in record["ranks"]} == {"gloo"}
        assert {rank["device"] for rank in record["ranks"]} == {"cuda:0"}
    return record


@pytest.mark.parametrize("name", SHARING)
def test_two_ranks_share_a_gpu(tmp_path: Path, name: str) -> None:
    _two_sharing(name, tmp_path / "run")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ddp_and_accelerate_end_with_the_same_bits(tmp_path: Path, precision: str) -> None:
    records = [
        _two_sharing(name, tmp_path / name, "--precision", precision, "--dropout", "0.1")
        for name in ("ddp", "accelerate")
    ]
    digests = {rank["weights_sha256"] for record in records for rank in record["ranks"]}
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["single", "ddp", "accelerate"])
def test_a_compiled_model_learns_what_the_plain_one_does(tmp_path: Path, name: str) -> None:
    plain, compiled = (
        train(name, tmp_path / option, *SHORT, "--num-processes", "1", option)
        for option in ("--no-torch-compile", "--torch-compile")
    )
    for one, other in zip(plain["steps"], compiled["steps"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_more_ranks_than_gpus_are_refused_where_each_needs_its_own() -> None:
    _require("horovod")
    done = lockstep("horovod", "--device", "cuda", "--num-processes", str(2 * count_gpus()))
    assert done.returncode == 2
    assert "needs a GPU for each rank" in done.stderr
