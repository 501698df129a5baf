"""BERT itself, in float32 and below: backends equal one another to the last bit, and agree to skip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.text.grammar import generate
from tests.launching import WHOLE, lockstep, require_backend, require_start_method, train
from tests.sparing import in_ci

TWENTY_STEPS = ("--num-processes", "2", "--max-steps", "20", "--dropout", "0.1", "--micro-batch-size", "8")


Runs = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains with given options, once for all tests of this module; the record tells where."""
    records: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(backend: str, *options: str) -> dict[str, Any]:
        require_backend(backend)
        key = (backend, *options)
        if key not in records:
            directory = tmp_path_factory.mktemp(backend) / "run"
            records[key] = train(backend, directory, "--eval-batch-size", "128", *options)
        return records[key]

    return run


def _trajectory(record: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(step["loss"], step["grad_norm"], step["learning_rate"], step["skipped"]) for step in record["steps"]]


def _digest(record: dict[str, Any]) -> str:
    (digest,) = {rank["weights_sha256"] for rank in record["ranks"]}
    return str(digest)


# Fabric adds norms up in the order of the optimizer's groups, so that clipping differs in the last bit.
ORDERS_NORMS = ("fabric",)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_weights_are_bitwise_equal_after_twenty_steps(run_once: Runs, precision: str) -> None:
    backends = [name for name in WHOLE if name not in ORDERS_NORMS]
    records = [run_once(backend, *TWENTY_STEPS, "--precision", precision) for backend in backends]
    assert len({_digest(record) for record in records}) == 1
    files = [load_file(Path(record["config"]["output_dir"]) / "model.safetensors") for record in records]
    for record, file in zip(records[1:], files[1:], strict=True):
        assert all(torch.equal(file[name], tensor) for name, tensor in files[0].items())
        assert _trajectory(record) == _trajectory(records[0])
        assert record["quality"] == records[0]["quality"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ORDERS_NORMS)
def test_weights_are_bitwise_equal_without_clipping(run_once: Runs, backend: str) -> None:
    options = (*TWENTY_STEPS, "--max-grad-norm", "0")
    assert _digest(run_once(backend, *options)) == _digest(run_once("ddp", *options))


def test_two_ranks_follow_one_process_to_rounding(run_once: Runs) -> None:
    options = ("--max-steps", "20", "--micro-batch-size", "8")
    single, double = run_once("single", *options), run_once("ddp", "--num-processes", "2", *options)
    for one, two in zip(single["steps"], double["steps"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "start_method"),
    [
        *(("ddp", "torchrun"), ("ddp", "fork"), ("ddp", "spawn")),
        *(("accelerate", "accelerate"), ("accelerate", "torchrun")),
        *(("horovod", "horovodrun"), ("horovod", "mpirun"), ("horovod", "horovod-node")),
    ],
)
def test_one_rank_trains_as_single_does(run_once: Runs, backend: str, start_method: str) -> None:
    require_backend(backend)
    require_start_method(start_method)
    options = ("--max-steps", "5", "--num-processes", "1")
    one, single = run_once(backend, *options, "--start-method", start_method), run_once("single", *options)
    # Bits are those of the same threads, batches and kernels: should they differ, the records say which of these do.
    assert _trajectory(one) == _trajectory(single), (one["ranks"], one["environment"], single["ranks"])


@pytest.mark.slow
def test_all_ranks_skip_together_while_the_fp16_scale_settles(tmp_path: Path, run_once: Runs) -> None:
    # Few and short texts: what no kernel of a CPU is made for takes a hundred times as long.
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "validation")}
    for seed, file in enumerate(files.values()):
        reviews = sorted(generate(400, seed=seed), key=lambda review: len(review["text"]))[:64]
        file.write_text("".join(f"{json.dumps(review)}\n" for review in reviews))
    options = ("--train-file", str(files["train"]), "--validation-file", str(files["validation"]))
    options = (*options, "--model", "bert-tiny", "--global-batch-size", "16", "--micro-batch-size", "4")
    options = (*options, "--max-steps", "16", "--num-train-epochs", "4")
    options = (*options, "--precision", "fp16", "--init-loss-scale", str(2**30))
    records = {backend: run_once(backend, *options) for backend in ("single", "ddp", "horovod")}
    for record in records.values():
        skipped = [step["skipped"] for step in record["steps"]]
        assert skipped[0]
        assert not all(skipped)
        # The schedule counts updates: it stands still while steps are skipped.
        rates = [step["learning_rate"] for step in record["steps"]]
        for before, after, was_skipped in zip(rates, rates[1:], skipped, strict=False):
            assert (before == after) == was_skipped
        assert _digest(record)
        assert record["quality"]["loss"] < 1
    assert _trajectory(records["ddp"]) == _trajectory(records["horovod"])


@pytest.mark.slow
@pytest.mark.launchers
@pytest.mark.parametrize(
    ("backend", "start_method"),
    in_ci(
        [("ddp", "spawn"), ("horovod", "mpirun")],
        [
            *(("ddp", "torchrun"), ("ddp", "spawn"), ("horovod", "mpirun"), ("horovod", "horovod-node")),
            ("accelerate", "torchrun"),
        ],
    ),
)
def test_other_start_methods_compute_the_same(run_once: Runs, backend: str, start_method: str) -> None:
    require_backend(backend)
    require_start_method(start_method)
    usual = run_once(backend, *TWENTY_STEPS, "--precision", "fp32")
    other = run_once(backend, *TWENTY_STEPS, "--start-method", start_method)
    assert _trajectory(usual) == _trajectory(other)
    assert _digest(usual) == _digest(other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--dataloader-num-workers", "1"), ("--eval-batch-size", "33"), ()], ids=str)
def test_runs_repeat_whatever_prepares_the_batches(run_once: Runs, options: tuple[str, ...]) -> None:
    usual = run_once("ddp", *TWENTY_STEPS, "--precision", "fp32")
    assert _trajectory(run_once("ddp", *TWENTY_STEPS, *options)) == _trajectory(usual)


@pytest.mark.slow
def test_the_seed_decides(run_once: Runs) -> None:
    usual = run_once("ddp", *TWENTY_STEPS, "--precision", "fp32")
    assert _trajectory(run_once("ddp", *TWENTY_STEPS, "--seed", "1")) != _trajectory(usual)


@pytest.mark.slow
# Clause C44 of the contract has one of each starter.
@pytest.mark.parametrize("backend", in_ci(["fabric"], ["ddp", "fabric"]))
def test_hostile_environment_changes_nothing(tmp_path: Path, run_once: Runs, backend: str) -> None:
    """Variables and files that libraries obey, and a working directory with impostors of libraries."""
    usual = run_once(backend, *TWENTY_STEPS, "--precision", "fp32")
    for name in ("horovod.py", "accelerate.py", "torch.py", "datasets.py", "launch.py", "tasks.py"):
        (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text("mixed_precision: bf16\nnum_processes: 7\n")
    hostile = {
        "HF_HOME": str(home),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "LT_PRECISION": "bf16-mixed",
        "LT_STRATEGY": "ddp",
        "PYTHONWARNINGS": "error",
        "WORLD_SIZE": "5",
        "RANK": "3",
        "MASTER_PORT": "1",
    }
    options = (*TWENTY_STEPS, "--precision", "fp32", "--eval-batch-size", "128")
    done = lockstep(backend, "--output-dir", "run", *options, env=hostile, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert _trajectory(record) == _trajectory(usual)
    assert [rank["effective_settings"] for rank in record["ranks"]] == [
        rank["effective_settings"] for rank in usual["ranks"]
    ]
