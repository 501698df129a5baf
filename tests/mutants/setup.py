"""Faults of `setup`, `unwrap` and the settings that are reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from contract import cases
from tests.mutants.changes import around_setup, replaced
from tests.mutants.mutant import mutant


@mutant(
    "C07",
    cases.PLAIN[0],
    words="the weights that rank 0 had before setup, saw a difference of 0.0046 in embedding.weight, mixer.weight",
)
def hidden_optimizer_step(backend: Any) -> Iterator[None]:
    """What Horovod's broadcast of the state of a new optimizer does."""

    def before(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    with around_setup(backend, before, lambda *_: None):
        yield


@mutant("C07", cases.PLAIN[0], words="saw {'weight_decay': 0.01, 'lr': 1.0")
def learning_rate_scaled_in_setup(backend: Any) -> Iterator[None]:
    def before(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= backend.world_size

    with around_setup(backend, before, lambda *_: None):
        yield


@mutant("C08", cases.PREPARED_OPTIMIZER, words="parameters with optimizer state: 4, saw 0")
def optimizer_state_dropped(backend: Any) -> Iterator[None]:
    with around_setup(backend, lambda *_: None, lambda model, optimizer, kept: optimizer.state.clear()):
        yield


@mutant(
    "C09",
    cases.PLAIN[0],
    words="rank 1: expected the weights of rank 0, saw a difference of 1.3 in gain, embedding.weight, mixer.weight",
)
def no_broadcast(backend: Any) -> Iterator[None]:
    def before(model: Any, optimizer: Any) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    def after(model: Any, optimizer: Any, kept: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)

    with around_setup(backend, before, after):
        yield


@mutant(
    "C09",
    cases.PLAIN[0],
    words="rank 1: expected the buffers of rank 0, saw a difference of 1.3 in marks, hidden_marks",
)
def no_broadcast_of_buffers(backend: Any) -> Iterator[None]:
    def before(model: Any, optimizer: Any) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in model.buffers()]

    def after(model: Any, optimizer: Any, kept: list[torch.Tensor]) -> None:
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)

    with around_setup(backend, before, after):
        yield


@mutant("C10", cases.PLAIN[0], words="the module that was passed to setup, saw another module")
def wrapper_not_unwrapped(backend: Any) -> Iterator[None]:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *arguments: Any) -> Any:
            return self.module(*arguments)

    with replaced(backend, "unwrap", lambda original: lambda model: Wrapper(original(model))):
        yield


@mutant("C06", cases.PLAIN[0], words='saw {"bucket_bytes": 1')
def settings_differ(backend: Any) -> Iterator[None]:
    with replaced(backend, "effective_settings", lambda original: lambda: original() | {"bucket_bytes": backend.rank}):
        yield


@mutant("C07", next(case for case in cases.HALF if case.name == "fp16-adamw-2"), words="'eps': 1e-08")
def larger_epsilon_in_half_precision(backend: Any) -> Iterator[None]:
    def before(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["eps"] = 1e-4

    with around_setup(backend, before, lambda *_: None):
        yield


@mutant("C07", cases.HALF[0], words="the buffers that rank 0 had before setup, saw a difference of ")
def buffers_rounded_in_half_precision(backend: Any) -> Iterator[None]:
    def before(model: Any, optimizer: Any) -> None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.bfloat16())

    with around_setup(backend, before, lambda *_: None):
        yield
