"""Backends and loops broken on purpose, each in one way that has been seen in published code.

A mutant is applied to a live adapter and to the loop of its process while one case is run; the
check it names must then fail, in the words it names: a check that fails for another reason, or for
everybody, catches nothing. Those at the end are adapters of their own, for what happens before
there is a group, or after.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backends.interface import StepResult
from contract import cases
from contract.cases import Case
from contract.jobs import MARK_VARIABLE
from tests.by_hand import ByHandBackend
from training import evaluation, loop, seeds
from training.plan import Plan
from training.state import TrainingState

Apply = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault: how to apply it, the check and case that must show it, and a fragment of what the check then says.

    Words are by adapter, "*" for all others.
    """

    name: str
    check_id: str
    case: Case
    words: dict[str, str]
    apply: Apply
    # Adapters on which this is no fault, with the reason.
    harmless_on: dict[str, str]
    # Adapters whose training it stops ("*": all), with words of the error.
    stops: dict[str, str]

    @property
    def mutated_case_name(self) -> str:
        return f"{self.name}--{self.case.name}"

    def words_of(self, adapter: str) -> str:
        """What the check says of it on this adapter, which may be that it stopped the training."""
        return self.words_of_stop(adapter) or self.words.get(adapter, self.words.get("*", ""))

    def words_of_stop(self, adapter: str) -> str | None:
        """Words of the error with which it stops the training on this adapter; None if it does not."""
        return self.stops.get(adapter, self.stops.get("*"))


MUTANTS: dict[str, Mutant] = {}


def mutant(
    check_id: str,
    case: Case,
    *,
    words: str | dict[str, str] = "",
    stops: dict[str, str] | None = None,
    **harmless_on: str,
) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        name = apply.__name__
        by_adapter = words if isinstance(words, dict) else {"*": words}
        MUTANTS[name] = Mutant(name, check_id, case, by_adapter, contextmanager(apply), harmless_on, stops or {})
        return apply

    return register


def replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replaces an attribute by what `make` makes of it."""
    return mock.patch.object(target, name, make(getattr(target, name)))


@contextmanager
def when_reduced(backend: Any, act: Callable[[list[torch.Tensor]], None]) -> Iterator[None]:
    """Acts on the parameters once their gradients are averaged and before anything reads them."""
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

                # Horovod averages inside step; the others are done by then, or, by hand, do it first.
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
    return replaced(backend, "backward", lambda original: lambda loss: original(loss * factor))


# The gradient's scale.


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.5, most in ",
)
def extra_division_by_world_size(backend: Any) -> Iterator[None]:
    with scaled_loss(backend, 1 / backend.world_size):
        yield


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 1, most in mixer.weight (2 times",
)
def sum_for_mean(backend: Any) -> Iterator[None]:
    with scaled_loss(backend, backend.world_size):
        yield


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.5, most in mixer.weight (0.5 times",
)
def division_by_accumulation_steps(backend: Any) -> Iterator[None]:
    with scaled_loss(backend, 1 / 2):
        yield


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.0062, most in ",
)
def mean_of_means(backend: Any) -> Iterator[None]:
    """Each rank divides by its own number of targets."""

    def local(original: Any) -> Any:
        def num_targets(task: Any, split: Any, sample_ids: Any) -> int:
            plan = Plan(num_samples=49, global_batch_size=16, micro_batch_size=8, world_size=2, seed=3)
            share = plan.micro_batches(torch.tensor(sample_ids).numpy(), backend.rank)[0]
            return int(original(task, split, share.sample_ids.tolist())) * backend.world_size

        return num_targets

    from tasks.token_tagging import TokenTagging

    with replaced(TokenTagging, "num_targets", local):
        yield


# Accumulation.


@mutant(
    "C26",
    cases.PLAIN[1],
    words="no reduction before the last micro-batch of step 1, saw 391 elements in backward 0",
    stops={"horovod": "Gradients were computed more than backward_passes_per_step times"},
    by_hand="reduces in step alone, whatever no_sync says",
)
def reduction_in_every_micro_step(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "no_sync", nullcontext):
        yield


@contextmanager
def kept_local(backend: Any, is_local: Callable[[int], bool]) -> Iterator[None]:
    """Runs the micro-batches for which `is_local` holds under no_sync, and only those; a window has two."""
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
            lambda original: lambda trainer, epoch: _unmutated(original, trainer, epoch, backend, autocast),
        ),
    ):
        yield


def _unmutated(original: Any, trainer: Any, epoch: int, backend: Any, autocast: Any) -> None:
    with mock.patch.object(backend, "autocast", autocast):
        original(trainer, epoch)


_BY_HAND_REDUCES = "reduces in step, whatever no_sync says"
_HOROVOD_SYNCHRONISES = "synchronize() reduces what the hooks have not"


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.33, most in ",
    by_hand=_BY_HAND_REDUCES,
    horovod=_HOROVOD_SYNCHRONISES,
)
def last_micro_batch_under_no_sync(backend: Any) -> Iterator[None]:
    with kept_local(backend, lambda micro_step: True):
        yield


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.27, most in ",
    by_hand=_BY_HAND_REDUCES,
    horovod="refuses a gradient that is still on its way, by chance",
)
def window_off_by_one(backend: Any) -> Iterator[None]:
    """The first micro-batch of a window is reduced and the last is not."""
    with kept_local(backend, lambda micro_step: micro_step > 0):
        yield


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.58, most in ",
    horovod="its optimizer refuses zero_grad while gradients are on their way",
)
def gradients_zeroed_in_the_window(backend: Any) -> Iterator[None]:
    """Only the last micro-batch counts."""
    backward = backend.backward

    def mutated(loss: torch.Tensor) -> None:
        for parameter in backend.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        backward(loss)

    with mock.patch.object(backend, "backward", mutated):
        yield


@mutant("C25", cases.PLAIN[0], words="391 elements to be reduced in step 1, saw 782")
def gradients_reduced_twice(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            backend.all_reduce(parameter.grad)

    with when_reduced(backend, act):
        yield


@mutant("C27", cases.PLAIN[0], words="only gradients to be communicated in step 3, saw barrier of ")
def barrier_in_every_step(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            backend.barrier()
            return original(max_grad_norm)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant(
    "C27",
    cases.PLAIN[0],
    words="only gradients to be communicated in step 7, saw allreduce of 3 in loop, allreduce of 3 in loop",
)
def buffers_sent_in_every_forward(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def autocast() -> Any:
            for buffer in backend.model.buffers():
                backend.all_reduce(buffer)
            return original()

        return autocast

    def evaluated(original: Any) -> Any:
        return lambda trainer, epoch: _unmutated(original, trainer, epoch, backend, autocast)

    autocast = backend.autocast
    with replaced(backend, "autocast", mutated), replaced(loop.Trainer, "evaluate", evaluated):
        yield


_REDUCES_WITHOUT_WRAPPER = "has no wrapper around the model"


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.4, most in ",
    by_hand=_REDUCES_WITHOUT_WRAPPER,
    horovod=_REDUCES_WITHOUT_WRAPPER,
)
def bare_module_trained(backend: Any) -> Iterator[None]:
    """The forward goes past the wrapper, which then reduces nothing."""

    def mutated(original: Any) -> Any:
        def setup(model: Any, optimizer: Any) -> Any:
            return model, original(model, optimizer)[1]

        return setup

    with replaced(backend, "setup", mutated), mock.patch.object(backend, "unwrap", lambda model: model):
        yield


@mutant("C27", cases.PLAIN[0], words="only gradients to be communicated in step 7, saw allreduce of 1 in loop")
def loss_reduced_in_every_step(backend: Any) -> Iterator[None]:
    with replaced(
        loop.Trainer,
        "train_step",
        lambda original: lambda *a, **o: (original(*a, **o), backend.all_reduce(torch.ones(1)))[0],
    ):
        yield


# Setup.


@contextmanager
def around_setup(backend: Any, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def setup(model: Any, optimizer: Any) -> Any:
            kept = before(model, optimizer)
            result = original(model, optimizer)
            after(model, result[1], kept)
            return result

        return setup

    with replaced(backend, "setup", mutated):
        yield


@mutant(
    "C07",
    cases.PLAIN[0],
    words="the weights that rank 0 had before setup, saw a difference of 0.0046 in embedding.weight, mixer.weight",
)
def hidden_optimizer_step(backend: Any) -> Iterator[None]:
    """What Horovod's broadcast of a fresh optimizer's state does."""

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


# The world.


@mutant("C01", cases.WORLD, words="a world size of 2, saw 1")
def world_size_one(backend: Any) -> Iterator[None]:
    """Each process finds itself alone."""
    with (
        mock.patch.object(backend, "world_size", 1),
        mock.patch.object(backend, "rank", 0),
        mock.patch.object(backend, "all_reduce", lambda tensor, op="sum": tensor.clone()),
    ):
        yield


@mutant("C02", cases.COLLECTIVES, words="sum in torch.float32 [3, -1], saw [1.0, 0.0]")
def reduction_dropped(backend: Any) -> Iterator[None]:
    with replaced(backend, "all_reduce", lambda original: lambda tensor, op="sum": (original(tensor, op), tensor)[1]):
        yield


@mutant("C02", cases.COLLECTIVES, words="sum in torch.float32 to leave its argument unchanged, saw a changed argument")
def reduction_in_place(backend: Any) -> Iterator[None]:
    with replaced(backend, "all_reduce", lambda original: lambda tensor, op="sum": tensor.copy_(original(tensor, op))):
        yield


@mutant("C03", cases.BARRIER, words="the file of each late rank after the barrier: [True, True], saw [")
def barrier_that_does_not_wait(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "barrier"):
        yield


# Data and evaluation, which belong to the loop.


@mutant(
    "C11",
    cases.PLAIN[1],
    words="the samples in step 1: [[18, 24, 25, 41], [38, 4, 3, 17]], saw [[22, 48, 32, 11], [40, 42, 35, 2]]",
)
def samples_of_the_neighbour(backend: Any) -> Iterator[None]:
    with replaced(
        Plan,
        "micro_batches",
        lambda original: lambda plan, batch, rank: original(plan, batch, (rank + 1) % plan.world_size),
    ):
        yield


@mutant("C12", cases.PLAIN[0], words="each of 49 samples once in epoch 0, saw these counts by sample: {8: 2, 10: 2")
def short_batch_dropped(backend: Any) -> Iterator[None]:
    def whole(original: Any) -> Any:
        return lambda plan, epoch: [batch for batch in original(plan, epoch) if len(batch) == plan.global_batch_size]

    steps_per_epoch = property(lambda plan: plan.num_samples // plan.global_batch_size)
    with replaced(Plan, "epoch", whole), mock.patch.object(Plan, "steps_per_epoch", steps_per_epoch):
        yield


@mutant("C12", cases.PLAIN[0], words="another order in every epoch, saw the same order twice")
def same_order_in_every_epoch(backend: Any) -> Iterator[None]:
    with replaced(Plan, "epoch", lambda original: lambda plan, epoch: original(plan, 0)):
        yield


@mutant(
    "C13",
    cases.PLAIN[0],
    words="each of 23 validation samples once, saw these counts by sample: {5: 2, 6: 2, 7: 2, 8: 2, 9: 2}",
)
def padded_duplicates_in_evaluation(backend: Any) -> Iterator[None]:
    """Ranks with fewer batches than others repeat one."""

    def mutated(original: Any) -> Any:
        def batches(num_samples: int, **sizes: Any) -> list[range]:
            mine = list(original(num_samples, **sizes))
            most = len(original(num_samples, **(sizes | {"rank": 0})))
            return mine + mine[: most - len(mine)]

        return batches

    with replaced(evaluation, "evaluation_batches", mutated):
        yield


def _changed_reductions(backend: Any, concerns: Callable[[torch.Tensor], bool]) -> Any:
    def mutated(original: Any) -> Any:
        def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            reduced = original(tensor, op)
            return tensor * backend.world_size if concerns(tensor) else reduced

        return all_reduce

    return replaced(backend, "all_reduce", mutated)


@mutant("C14", cases.PLAIN[0], words="after epoch 0, saw 2.26980713")
def metrics_of_the_rank(backend: Any) -> Iterator[None]:
    with _changed_reductions(backend, lambda tensor: tensor.ndim == 2 and tensor.is_floating_point()):
        yield


@mutant("C15", cases.PLAIN[0], words="in step 1, saw 2.26533616")
def loss_of_the_rank(backend: Any) -> Iterator[None]:
    with _changed_reductions(backend, lambda tensor: tensor.ndim == 1 and tensor.dtype == torch.float64):
        yield


# The step.


def _around_step(backend: Any, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> Any:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            before(backend.optimizer)
            result = original(max_grad_norm)
            after(backend.optimizer)
            return result

        return step

    return replaced(backend, "step", mutated)


@mutant(
    "C17",
    cases.PLAIN[0],
    words="weights after step 1 within 1e-12 of the reference, saw a difference of 0.15, most in ",
)
def learning_rate_times_world_size(backend: Any) -> Iterator[None]:
    def scale(factor: float) -> Callable[[Any], None]:
        def act(optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= factor

        return act

    with _around_step(backend, scale(backend.world_size), scale(1 / backend.world_size)):
        yield


@mutant(
    "C18",
    cases.MOMENTUM,
    words="weights after step 2 within 1e-12 of the reference, saw a difference of 0.13, most in ",
)
def momentum_forgotten(backend: Any) -> Iterator[None]:
    with _around_step(backend, lambda optimizer: optimizer.state.clear(), lambda optimizer: None):
        yield


@mutant("C19", cases.CLIPPED[0], words=", saw 0.05")
def norm_after_clipping(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            result = original(max_grad_norm)
            return StepResult(result.grad_norm.clamp(max=max_grad_norm), result.skipped)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[1],
    words={
        "*": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.38, most in ",
        "by_hand": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.4, most in ",
    },
    horovod="gradients are on their way when it would clip: see the next one",
)
def clipping_in_every_micro_step(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def backward(loss: torch.Tensor) -> None:
            original(loss)
            torch.nn.utils.clip_grad_norm_(backend.model.parameters(), 0.05)

        return backward

    with replaced(backend, "backward", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[0],
    words={
        "by_hand": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.076, most in ",
        "horovod": "gradients in step 1 within 1e-12 of the reference, saw a difference of ",
    },
    ddp="has reduced by the time step is called",
    accelerate="has reduced by the time step is called",
)
def clipping_before_synchronise(backend: Any) -> Iterator[None]:
    """Clips what each rank has, and then has it averaged."""

    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            norm = torch.nn.utils.clip_grad_norm_(backend.model.parameters(), max_grad_norm)
            if not hasattr(backend.optimizer, "synchronize"):
                return StepResult(norm, original(0.0).skipped)
            backend.optimizer.step()  # which synchronises
            backend.optimizer.zero_grad()
            return StepResult(norm, skipped=False)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[0],
    words={
        "*": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.42, most in mixer.bias",
        "by_hand": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.45, most in mixer.bias",
    },
)
def clipping_by_group(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for group in ([p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]):
            torch.nn.utils.clip_grad_norm_(group, 0.04)

    with when_reduced(backend, act):
        yield


@mutant(
    "C21", cases.ADAMW, words="weights after step 2 within 1e-09 of the reference, saw a difference of 0.0013, most in "
)
def adam_counter_ahead_by_one(backend: Any) -> Iterator[None]:
    """What a hidden first step leaves behind for good."""

    def after(optimizer: Any) -> None:
        for state in optimizer.state.values():
            if float(state["step"]) == 1:
                state["step"] += 1

    with _around_step(backend, lambda optimizer: None, after):
        yield


def _learning_rate_of(num_updates: Callable[[Any], int]) -> Any:
    def mutated(original: Any) -> Any:
        def set_learning_rate(trainer: Any) -> float:
            kept = trainer.state.num_updates
            trainer.state.num_updates = num_updates(trainer)
            rate: float = original(trainer)
            trainer.state.num_updates = kept
            return rate

        return set_learning_rate

    return replaced(loop.Trainer, "set_learning_rate", mutated)


@mutant("C22", cases.ADAMW, words="a learning rate of 0.005 in step 2, saw 0.01")
def schedule_per_micro_step(backend: Any) -> Iterator[None]:
    with _learning_rate_of(lambda trainer: trainer.state.num_updates * trainer.config.gradient_accumulation_steps):
        yield


@mutant("C22", cases.ADAMW, words="a learning rate of 0.005 in step 2, saw 0.01")
def schedule_per_rank(backend: Any) -> Iterator[None]:
    with _learning_rate_of(lambda trainer: trainer.state.num_updates * trainer.config.num_processes):
        yield


def _rounded(dtype: torch.dtype) -> Callable[[list[torch.Tensor]], None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.copy_(parameter.grad.to(dtype))

    return act


@mutant("C23", cases.FLOAT32, words="gradients in step 1 within 0.0001 of the reference, saw a difference of 0.000")
def compressed_gradients(backend: Any) -> Iterator[None]:
    with when_reduced(backend, _rounded(torch.float16)):
        yield


@mutant("C24", cases.BITS, words="the bits of averaging by hand after step 2, saw a difference of")
def one_bit_off(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.mul_(1 + 1.2e-7)

    with when_reduced(backend, act):
        yield


# Precision.


@mutant(
    "C28",
    cases.HALF[0],
    words="gradients in step 1 within 0.004 of the reference, saw a difference of 0.",
    by_hand=_BY_HAND_REDUCES,
    horovod=_HOROVOD_SYNCHRONISES,
)
def half_precision_gradients_not_reduced(backend: Any) -> Iterator[None]:
    with kept_local(backend, lambda micro_step: True):
        yield


@mutant(
    "C28",
    cases.HALF[0],
    words="gradients in step 1 within 0.004 of the reference, saw a difference of 0.5, most in mixer.weight (0.5 times",
)
def half_precision_gradients_halved(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    with when_reduced(backend, act):
        yield


@mutant(
    "C29",
    cases.HALF[0],
    words="a hidden layer in torch.bfloat16, saw torch.float32",
    accelerate="has put autocast around the model's own forward as well",
)
def precision_ignored(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "autocast", nullcontext):
        yield


@mutant("C30", cases.OVERFLOWS[0], words="rank 0: expected skipped steps [3], saw []")
def overflow_decided_by_each_rank(backend: Any) -> Iterator[None]:
    """Rank 0 does not learn of the overflow of rank 1."""

    def act(parameters: list[torch.Tensor]) -> None:
        if backend.rank == 0:
            for parameter in parameters:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    with when_reduced(backend, act):
        yield


@mutant("C30", cases.INFINITE_LOSS, words="skipped steps [3], saw []")
def infinite_loss_applied(backend: Any) -> Iterator[None]:
    """The option that forbids it is not heeded."""
    with mock.patch.object(backend, "must_skip", return_value=False):
        yield


@mutant("C31", cases.OVERFLOWS[0], words="a loss scale in step 4 of 512.0, saw 256.0")
def scale_quartered(backend: Any) -> Iterator[None]:
    with replaced(
        torch.amp.GradScaler, "__init__", lambda original: lambda *a, **o: original(*a, **o, backoff_factor=0.25)
    ):
        yield


@mutant("C32", cases.OVERFLOWS[0], words="a learning rate of 0.375 in step 4, saw 0.3125")
def schedule_counts_skipped_steps(backend: Any) -> Iterator[None]:
    with _learning_rate_of(lambda trainer: trainer.state.step - 1):
        yield


@mutant(
    "C33", cases.CLIP_FP16, words="unclipped weights after step 1 within 1e-05 of the reference, saw a difference of 0."
)
def scaled_gradients_clipped(backend: Any) -> Iterator[None]:
    threshold = [0.0]

    def remember(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            threshold[0] = max_grad_norm
            return original(max_grad_norm)

        return step

    def act(parameters: list[torch.Tensor]) -> None:
        if threshold[0]:
            torch.nn.utils.clip_grad_norm_(parameters, threshold[0])

    with when_reduced(backend, act), replaced(backend, "step", remember):
        yield


# Randomness.


@mutant("C34", cases.DROPOUT, words="rank 1: expected other masks than on rank 0, saw 7 of 7 equal masks")
def same_noise_on_all_ranks(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda seed, purpose, *key: original(seed, purpose, *key[1:])

    with replaced(seeds, "random_seed", mutated):
        yield


@mutant("C35", cases.DROPOUT, words="the masks in step 1: [[")
def noise_that_does_not_repeat(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda seed, purpose, *key: original(seed, purpose, *key, *([time.monotonic_ns()] if key else []))

    with replaced(seeds, "random_seed", mutated):
        yield


# Unused parameters.


@mutant(
    "C36",
    cases.UNANNOUNCED[1],
    words={
        "*": "the parameter idle, saw no error",
        "ddp": "the parameter idle, saw RuntimeError: Expected to have finished reduction",
        "accelerate": "the parameter idle, saw RuntimeError: Expected to have finished reduction",
    },
)
def unused_parameter_ignored(backend: Any) -> Iterator[None]:
    with mock.patch.object(loop, "require_gradients"):
        yield


@mutant("C37", cases.UNUSED, words="the unused parameter unchanged after step 1, saw a difference of 0.25 in idle")
def zeros_for_an_unused_parameter(backend: Any) -> Iterator[None]:
    def before(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    with _around_step(backend, before, lambda optimizer: None):
        yield


@mutant(
    "C38",
    cases.RARE,
    words="mixer.bias, mixer.weight, output.bias, saw idle on one side only",
)
def gradient_for_users_only(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        if backend.rank == 1:
            for parameter in parameters:
                if parameter.shape == (3, 3):
                    parameter.grad = None

    with when_reduced(backend, act):
        yield


# State.


@mutant("C39", cases.STATE, words="learning rates in step 4: [0.00833")
def schedule_not_restored(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda training, state: original(training, state | {"num_updates": 0})

    with replaced(TrainingState, "load_state_dict", mutated):
        yield


@mutant("C39", cases.STATE_FP16, words="loss scales in step 4: [512.0], saw [1024.0]")
def scaler_not_restored(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "load_state_dict"):
        yield


@mutant(
    "C40", cases.STATE, words="weights after step 4 within 1e-09 of the reference, saw a difference of 0.012, most in "
)
def optimizer_not_restored(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def load(training: Any, state: Any) -> None:
            original(training, state)
            training.optimizer.state.clear()

        return load

    with replaced(TrainingState, "load_state_dict", mutated):
        yield


@mutant(
    "C41",
    cases.STATE,
    words="state that the single-process backend can load, saw Error(s) in loading state_dict for Tagger",
)
def wrapper_saved(backend: Any) -> Iterator[None]:
    """Names carry the prefix of a wrapper; the backend itself understands them."""

    def saved(original: Any) -> Any:
        def state_dict(training: Any) -> Any:
            state = original(training)
            return state | {"model": {f"module.{name}": tensor for name, tensor in state["model"].items()}}

        return state_dict

    def loaded(original: Any) -> Any:
        def load(training: Any, state: Any) -> None:
            model = {name.removeprefix("module."): tensor for name, tensor in state["model"].items()}
            original(training, state | {"model": model})

        return load

    with replaced(TrainingState, "state_dict", saved), replaced(TrainingState, "load_state_dict", loaded):
        yield


@mutant("C42", cases.STATE, stops={"*": "plain data and tensors are all that may be saved, but a pathlib"})
def state_that_runs_code(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"path": Path("anywhere")}):
        yield


@mutant("C42", cases.STATE, words="rank 1: expected the saved loss scaler of rank 0: {'rank': 0}, saw {'rank': 1}")
def state_of_the_rank(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"rank": backend.rank}):
        yield


# Adapters of their own.


class CarelessBackend(ByHandBackend):
    """C04: takes whatever it is asked for."""

    def __init__(self, options: Any) -> None:
        with mock.patch("backends.interface.Capabilities.check"):
            super().__init__(options)


class ClingingBackend(ByHandBackend):
    """C05: cannot leave."""

    def shutdown(self) -> None:
        raise RuntimeError("the group does not let go")


class AbortingBackend(ByHandBackend):
    """C05: leaves, and then dies of what was left of it."""

    def shutdown(self) -> None:
        super().shutdown()
        os.abort()


class LitteringBackend(ByHandBackend):
    """C43: starts a process of its own and leaves it behind, out of the launcher's sight."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        # Without the launcher's mark, by which it finds what to end: daemons are known to clear their environment.
        environment = {name: value for name, value in os.environ.items() if name == MARK_VARIABLE}
        subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)


class ObedientBackend(ByHandBackend):
    """C44: reads the user's accelerate configuration."""

    def autocast(self) -> Any:
        file = Path(os.environ.get("HF_HOME", "")) / "accelerate" / "default_config.yaml"
        if file.exists() and "bf16" in file.read_text():
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return super().autocast()


class HangingBackend(ByHandBackend):
    """Never comes back from its third step, on rank 1."""

    _steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        self._steps += 1
        while self._steps == 3 and self.rank == 1:
            time.sleep(1)
        return super().step(max_grad_norm)


class LonelyBackend(ByHandBackend):
    """Finds itself alone, as under another library's launcher."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.rank, self.world_size = 0, 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor.clone()


# The check that each must break, and its words; what they are derived from breaks none.
ADAPTERS = {
    "CarelessBackend": ("C04", "device=cpu, saw ValueError: Error initializing torch.distributed"),
    "ClingingBackend": ("C05", "the group does not let go"),
    "AbortingBackend": ("C05", "crashed (Aborted)"),
    "LitteringBackend": ("C43", "processes left behind: [], saw ["),
    "ObedientBackend": ("C44", "weights sha256"),
}
