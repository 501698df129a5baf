"""DataParallel: what it refuses, and what its replicas compute, with stand-ins for the copies between GPUs."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from backends import registry
from backends.capabilities import UnsupportedError
from backends.interface import BackendOptions
from backends.registry import BACKENDS
from compare.bare.job import BareJob, Outcome, Settings, Step
from contract.check import State
from launch.batching import settle_batching
from launch.doctor import run as doctor
from launch.errors import UsageError
from launch.resolve import check_compilable
from records.checkpoint import checkpoint_path
from records.config import RunOptions
from tasks.interface import Batch
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.dp_on_cpu import NUM_DEVICES, DPOnCpu, devices_on_cpu
from tests.launching import lockstep, train
from tests.resuming import assert_equal_to_rounding
from tests.test_packing import KINDS, _batches, _gradients, _model

ON_CPU = "tests.dp_on_cpu:DPOnCpu"

# What is refused.


@pytest.mark.parametrize(("num_gpus", "words"), [(0, "no GPU is visible"), (1, "1 GPU is visible"), (2, None)])
def test_it_needs_two_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_gpus: int, words: str | None
) -> None:
    """With fewer, DataParallel only calls the model."""
    monkeypatch.setattr(registry, "count_gpus", lambda: num_gpus)
    doctor([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dp: ")]
    assert len(lines) == (words is not None)
    assert all(words and words in line and "use single, or ddp" in line for line in lines)


def test_several_ranks_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"--num-processes 2: dp runs at most 1 process\(es\) \(which uses all"):
        BACKENDS["dp"].capabilities.check(name="dp", device="cuda", precision="fp32", world_size=2)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--device cpu: dp supports only cuda; choose"):
        BACKENDS["dp"].capabilities.check(name="dp", device="cpu", precision="fp32")


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(UsageError, match="--torch-compile: dp cannot train a compiled model"):
        check_compilable("dp", BACKENDS["dp"])


def test_a_row_of_samples_is_refused() -> None:
    task = TokenTagging(TokenTaggingSettings())
    assert settle_batching(RunOptions(), task, cuts_batches=True) == "sorted"
    with pytest.raises(UsageError, match="--batching packed: the backend cuts batches into shares"):
        settle_batching(RunOptions(batching="packed"), task, cuts_batches=True)


def test_a_run_that_packed_its_samples_goes_on_with_the_default_batches(tmp_path: Path) -> None:
    """The user gave no --batching; what the user gives is refused."""
    options = ("--task", "token-tagging", "--max-steps", "4", "--save-every", "2", "--threads-per-rank", "1")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train("single", whole, *options)["config"]["batching"] == "packed"
    start = checkpoint_path(whole, 2)
    done = lockstep(ON_CPU, "--resume", start, "--batching", "packed", "--output-dir", run)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("lockstep: --batching packed: the backend cuts batches into shares")
    done = lockstep(ON_CPU, "--resume", start, "--output-dir", run)
    assert done.returncode == 0, done.stderr
    assert "batches are sorted instead of packed" in done.stdout
    assert_equal_to_rounding(run, whole, rel=1e-9)


# What is computed; the clauses of the contract are in tests/test_contract.py.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "clause", "words"),
    [
        ("ZerosForUnused", "C36", "an error that names the parameter idle"),
        ("ZerosForUnused", "C37", "the unused parameter unchanged"),
        ("MeanOfReplicas", "C16", "0.3333 times the reference"),
    ],
)
def test_the_contract_catches_what_goes_wrong_with_replicas(
    tmp_path: Path, fault: str, clause: str, words: str
) -> None:
    options = ("--check", clause, "--num-processes", "1", "--precision", "fp32", "--json", tmp_path / "out.json")
    done = lockstep("contract", f"tests.dp_on_cpu:{fault}", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    text = (tmp_path / "out.json").read_text()
    assert State.FAILED.value in text
    assert words in text


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_compute_at_once_draw_the_masks_of_their_own_samples(kind: str) -> None:
    """Each waits for the others in its embeddings, before the first mask is drawn."""
    model = _model(kind, dropout=0.3)
    batch, _ = _batches(kind)
    expected = _gradients(model, batch)
    together, threads = threading.Barrier(NUM_DEVICES, timeout=60), set()

    def wait(*_: Any) -> None:
        together.wait()
        threads.add(threading.get_ident())

    handle = model.base_model.get_submodule("embeddings").register_forward_hook(wait)
    with devices_on_cpu(take_turns=False):
        seen = _gradients(torch.nn.DataParallel(model), batch)
    handle.remove()
    assert len(threads) == NUM_DEVICES
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((seen[f"module.{name}"] - gradient).abs().max()) <= 1e-12 * largest, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_replica_computes_in_the_precision_that_was_asked_for(precision: str) -> None:
    """Each thread begins with the dtype of autocast's default, which is bf16 on a CPU and fp16 on a GPU."""
    dtypes: Counter[torch.dtype] = Counter()
    model = torch.nn.Linear(4, 2)
    model.register_forward_hook(lambda _, __, output: dtypes.update([output.dtype]))
    backend = DPOnCpu(BackendOptions(precision=precision))
    wrapped, _ = backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with backend.autocast():
        wrapped(torch.ones(6, 4))
    backend.shutdown()
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]: NUM_DEVICES}


def test_every_gpu_drops_other_units() -> None:
    """They are seeded alike, as torch.manual_seed does it."""
    backend = DPOnCpu(BackendOptions())
    model = torch.nn.Linear(4, 2)
    wrapped, _ = backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for generator in torch.cuda.default_generators:
        generator.manual_seed(7)
    wrapped(torch.ones(6, 4))
    seeds = [generator.initial_seed() for generator in torch.cuda.default_generators]
    backend.shutdown()
    assert seeds[0] == 7
    assert len(set(seeds)) == NUM_DEVICES


def test_bert_learns_what_it_learns_in_one_process(tmp_path: Path) -> None:
    """A batch of two samples has fewer than there are devices, and dropout is that of the sample."""
    options = ("--max-steps", "3", "--dropout", "0.1", "--micro-batch-size", "2", "--global-batch-size", "4")
    options = (
        *options,
        "--threads-per-rank",
        "1",
        "--save-every",
        "never",
        "--no-evaluate",
        "--batching",
        "sorted",
        "--trace",
        "1",
    )
    alone, replicated = (train(name, tmp_path / name.partition(":")[0], *options) for name in ("single", ON_CPU))
    assert replicated["ranks"][0]["effective_settings"]["num_devices"] == NUM_DEVICES
    assert alone["ranks"][0]["memory"]["activation_bytes"] > 0
    assert replicated["ranks"][0]["memory"]["activation_bytes"] is None
    for one, other in zip(alone["steps"], replicated["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_the_loop_by_hand_computes_what_one_process_computes() -> None:
    from compare.bare import dp, single

    torch.manual_seed(0)
    batches = [Batch({"x": torch.randn(rows, 4)}, num_tokens=rows, num_positions=rows) for rows in (5, 2, 1)]
    steps = [Step([(batch, 1.0) for batch in batches], 8)] * 3
    settings = Settings("cpu", "fp32", 3, 3, 0, 0.1, 0.01, 1.0, 65536.0)
    weights = []
    with devices_on_cpu():
        for loop in (single, dp):
            torch.manual_seed(1)
            model, outcomes = torch.nn.Linear(4, 3), list[Outcome]()
            job = BareJob(
                model, steps, lambda model, one: model(one.tensors["x"]).square().sum(), outcomes.append, settings
            )
            loop.train(job)
            assert len(outcomes) == len(steps)
            weights.append(model.state_dict())
    assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
