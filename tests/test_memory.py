"""What a record says of memory, against what can be counted by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from backends.single import SingleBackend
from launch.starters.interface import PROJECT_DIRECTORY
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.launching import run_config
from training.loop import Trainer
from training.memory import MemoryMeter, held_bytes
from training.world import weights_digest


def _meter(
    directory: Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    apart: Sequence[torch.Tensor] = (),
    **options: Any,
) -> MemoryMeter:
    config = run_config("single", 1, directory, micro_batch_size=32, **options)
    state = SimpleNamespace(module=module, optimizer=optimizer)
    backend = SimpleNamespace(num_devices=1, gradients_apart=lambda: apart)
    return MemoryMeter(cast(Trainer, SimpleNamespace(config=config, state=state, backend=backend)))


def _step(meter: MemoryMeter, module: torch.nn.Module, *batches: torch.Tensor, step: int = 1) -> None:
    for batch in batches:
        meter.on_phase("forward", step)
        loss = module(batch).relu().sum()
        meter.on_phase("backward", step)
        loss.backward()
    meter.on_phase("update", step)


def test_a_linear_layer(tmp_path: Path) -> None:
    """Autograd keeps the input, for the gradient of the weight, and what relu returns; the weight is not counted."""
    module = torch.nn.Linear(3, 5)
    module.register_buffer("table", torch.zeros(7, dtype=torch.float64))
    optimizer = torch.optim.AdamW(module.parameters())
    meter = _meter(tmp_path, module, optimizer, trace=1)
    _step(meter, module, torch.ones(8, 3), torch.ones(6, 3))
    optimizer.step()
    _step(meter, module, torch.ones(100, 3), step=2)
    record = meter.record()
    assert record.parameter_bytes == record.gradient_bytes == 4 * (5 * 3 + 5)
    assert record.buffer_bytes == 7 * 8
    assert record.optimizer_bytes == 2 * record.parameter_bytes + 2 * 4  # two moments, and a counter of each weight
    assert record.activation_bytes == 4 * (8 * 3 + 8 * 5)


@pytest.mark.parametrize("options", [{}, {"trace": 1, "torch_compile": True}])
def test_activations_are_counted_only_where_it_costs_no_timed_run(tmp_path: Path, options: dict[str, Any]) -> None:
    module = torch.nn.Linear(3, 5)
    meter = _meter(tmp_path, module, torch.optim.SGD(module.parameters(), 0.1), **options)
    _step(meter, module, torch.ones(8, 3))
    assert meter.record().activation_bytes is None
    assert meter.record().gradient_bytes == 80
    assert meter.record().optimizer_bytes == 0


def test_the_rehearsal_of_a_resumed_run_is_not_counted(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 5)
    meter = _meter(tmp_path, module, torch.optim.SGD(module.parameters(), 0.1), diagnose=True)
    _step(meter, module, torch.ones(800, 3), step=0)
    assert meter.record().gradient_bytes is None
    _step(meter, module, torch.ones(8, 3), step=4)
    assert meter.record().activation_bytes == 4 * (8 * 3 + 8 * 5)


def test_copies_that_the_optimizer_updates_are_its_own(tmp_path: Path) -> None:
    """As under amp, which trains float32 copies of half-precision parameters."""
    module = torch.nn.Linear(3, 5).half()
    copies = [parameter.detach().float() for parameter in module.parameters()]
    meter = _meter(tmp_path, module, torch.optim.SGD(copies, 0.1))
    for parameter, copy in zip(module.parameters(), copies, strict=True):
        parameter.grad, copy.grad = torch.zeros_like(parameter), torch.zeros_like(copy)
    meter.on_phase("update", 1)
    assert meter.record().parameter_bytes == 2 * 20
    assert meter.record().optimizer_bytes == 4 * 20
    assert meter.record().gradient_bytes == (2 + 4) * 20


def test_gradients_that_a_library_keeps_elsewhere_are_counted(tmp_path: Path) -> None:
    """As under DeepSpeed, which leaves none in the parameters; those in a common buffer count once."""
    module, buffer = torch.nn.Linear(3, 5), torch.zeros(10)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    meter = _meter(tmp_path, module, optimizer, [buffer[:4], buffer[4:], torch.zeros(2)])
    meter.on_phase("update", 1)
    assert meter.record().gradient_bytes == 4 * (10 + 2)


def test_storages_count_once() -> None:
    bucket = torch.zeros(10)
    assert held_bytes([bucket[:4], bucket[4:], bucket]) == 40
    assert held_bytes([torch.sparse_coo_tensor([[1, 2]], [1.0, 2.0], (1000,), check_invariants=True)]) == 2 * 8 + 2 * 4


def test_counting_changes_nothing(tmp_path: Path) -> None:
    digests = set()
    for counts in (True, False):
        task = TokenTagging(TokenTaggingSettings())
        task.prepare()
        config = run_config("single", 1, tmp_path, micro_batch_size=16, diagnose=counts)
        trainer = Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))
        trainer.observe(meter := MemoryMeter(trainer))
        trainer.train()
        digests.add(weights_digest(trainer.state.module))
        assert (meter.record().activation_bytes is not None) == counts
    assert len(digests) == 1


def test_a_process_is_not_as_large_as_what_started_it() -> None:
    """Which is what getrusage(2) says."""
    ballast = b"x" * 400_000_000
    words = "from records.resident import peak_resident_bytes; print(peak_resident_bytes())"
    printed = subprocess.check_output([sys.executable, "-c", words], cwd=PROJECT_DIRECTORY)
    assert int(printed) < 200_000_000 < len(ballast)
