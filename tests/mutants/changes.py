"""How a mutant changes a live adapter or the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from backends.interface import StepResult
from training import loop


def replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replaces an attribute by what `make` returns for it."""
    return mock.patch.object(target, name, make(getattr(target, name)))


@contextmanager
def when_reduced(backend: Any, act: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """Calls `act` with the parameters once their gradients are averaged, before anything reads them."""
    with ExitStack() as stack:

        def setup(original: Any) -> Any:
            def mutated(model: Any, optimizer: Any) -> Any:
                wrapped, wrapped_optimizer = original(model, optimizer)
                parameters = [p for group in wrapped_optimizer.param_groups for p in group["params"]]

                def acting(original_call: Any) -> Any:
                    def call(*arguments: Any, **options: Any) -> Any:
                        synchronises = call_is_synchronise
                        result = original_call(*arguments, **options) if synchronises else None
                        act([p for p in parameters if p.grad is not None])
                        return result if synchronises else original_call(*arguments, **options)

                    return call

                # Horovod averages inside `step`. The others have averaged by then, or do so first in `step`.
                call_is_synchronise = hasattr(wrapped_optimizer, "synchronize")
                if call_is_synchronise:
                    wrapped_optimizer.synchronize = acting(wrapped_optimizer.synchronize)
                else:
                    stack.enter_context(replaced(backend, "step", acting))
                return wrapped, wrapped_optimizer

            return mutated

        stack.enter_context(replaced(backend, "setup", setup))
        yield


def scaled_loss(backend: Any, factor: float) -> Any:
    """Multiplies every loss by a factor before the backward pass."""
    return replaced(backend, "backward", lambda original: lambda loss: original(loss * factor))


@contextmanager
def kept_local(backend: Any, is_local: Callable[[int], bool]) -> Iterator[None]:
    """Runs the micro-batches for which `is_local` holds under no_sync, and no others; a step has two."""
    no_sync, backward, step, autocast = backend.no_sync, backend.backward, backend.step, backend.autocast
    stack, micro_step = ExitStack(), [0]

    def mutated_autocast() -> Any:
        if is_local(micro_step[0]):
            stack.enter_context(no_sync())
        return autocast()

    def mutated_backward(loss: torch.Tensor) -> None:
        backward(loss)
        stack.close()
        micro_step[0] += 1

    def mutated_step(max_grad_norm: float) -> StepResult:
        micro_step[0] = 0
        return step(max_grad_norm)

    with (
        mock.patch.object(backend, "no_sync", nullcontext),
        mock.patch.object(backend, "autocast", mutated_autocast),
        mock.patch.object(backend, "backward", mutated_backward),
        mock.patch.object(backend, "step", mutated_step),
        # The loop enters no_sync around evaluation nowhere, but evaluation uses autocast.
        replaced(
            loop.Trainer,
            "evaluate",
            lambda original: lambda trainer, epoch: unmutated_autocast(original, trainer, epoch, backend, autocast),
        ),
    ):
        yield


def unmutated_autocast(original: Any, trainer: Any, epoch: int, backend: Any, autocast: Any) -> None:
    with mock.patch.object(backend, "autocast", autocast):
        original(trainer, epoch)


@contextmanager
def around_setup(backend: Any, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Calls `before(model, optimizer)` before `setup`, and `after` with the same and the result of `before`."""

    def mutated(original: Any) -> Any:
        def setup(model: Any, optimizer: Any) -> Any:
            kept = before(model, optimizer)
            result = original(model, optimizer)
            after(model, result[1], kept)
            return result

        return setup

    with replaced(backend, "setup", mutated):
        yield


def around_step(backend: Any, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> Any:
    """Calls functions of the optimizer before and after every step."""

    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            before(backend.optimizer)
            result = original(max_grad_norm)
            after(backend.optimizer)
            return result

        return step

    return replaced(backend, "step", mutated)


def changed_learning_rate(num_updates: Callable[[Any], int]) -> Any:
    """Computes the learning rate from another number of updates than the trainer's."""

    def mutated(original: Any) -> Any:
        def set_learning_rate(trainer: Any) -> float:
            kept = trainer.state.num_updates
            trainer.state.num_updates = num_updates(trainer)
            rate: float = original(trainer)
            trainer.state.num_updates = kept
            return rate

        return set_learning_rate

    return replaced(loop.Trainer, "set_learning_rate", mutated)


@contextmanager
def hooked_gradients(
    backend: Any, is_concerned: Callable[[torch.Tensor], bool], change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Changes what the backward pass of this rank gives to some parameters, before anything is reduced."""

    def after(model: Any, optimizer: Any, kept: Any) -> None:
        for parameter in filter(is_concerned, model.parameters()):
            parameter.register_hook(change)

    with around_setup(backend, lambda *_: None, after):
        yield


@contextmanager
def left_local(backend: Any, is_concerned: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Leaves some parameters with the gradient of their own rank, as if the average had gone into a copy."""
    own: dict[int, torch.Tensor] = {}

    def after(model: Any, optimizer: Any, kept: Any) -> None:
        for parameter in filter(is_concerned, model.parameters()):
            parameter.register_hook(adding(id(parameter)))

    def adding(key: int) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            own[key] = own[key] + gradient if key in own else gradient.clone()

        return add

    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) in own:
                parameter.grad.copy_(own[id(parameter)])
        own.clear()

    with around_setup(backend, lambda *_: None, after), when_reduced(backend, act):
        yield
