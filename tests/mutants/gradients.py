"""Gradients that are averaged, scaled or accumulated wrongly, and communication that is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from backends.interface import StepResult
from contract import cases
from tasks.token_tagging import TokenTagging
from tests.mutants.changes import around_step, kept_local, replaced, scaled_loss, unmutated_autocast, when_reduced
from tests.mutants.mutant import BY_HAND_REDUCES, HOROVOD_SYNCHRONISES, mutant
from training import loop
from training.plan import Plan


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
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.083, most in ",
)
def mean_of_means(backend: Any) -> Iterator[None]:
    """Each rank divides by its own number of targets."""

    def local(original: Any) -> Any:
        def num_targets(task: Any, split: Any, sample_ids: Any) -> int:
            plan = Plan(num_samples=49, global_batch_size=16, micro_batch_size=8, world_size=2, seed=3)
            share = plan.micro_batches(torch.tensor(sample_ids).numpy(), backend.rank)[0]
            return int(original(task, split, share.sample_ids.tolist())) * backend.world_size

        return num_targets

    with replaced(TokenTagging, "num_targets", local):
        yield


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


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.54, most in ",
    by_hand=BY_HAND_REDUCES,
    horovod=HOROVOD_SYNCHRONISES,
)
def last_micro_batch_under_no_sync(backend: Any) -> Iterator[None]:
    with kept_local(backend, lambda micro_step: True):
        yield


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.44, most in ",
    by_hand=BY_HAND_REDUCES,
    horovod="refuses a gradient that is still on its way, by chance",
)
def window_off_by_one(backend: Any) -> Iterator[None]:
    """The first micro-batch of a step is reduced, and the last is not."""
    with kept_local(backend, lambda micro_step: micro_step > 0):
        yield


@mutant(
    "C16",
    cases.PLAIN[1],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.47, most in ",
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
        return lambda trainer, epoch: unmutated_autocast(original, trainer, epoch, backend, autocast)

    autocast = backend.autocast
    with replaced(backend, "autocast", mutated), replaced(loop.Trainer, "evaluate", evaluated):
        yield


_REDUCES_WITHOUT_WRAPPER = "has no wrapper around the model"


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.45, most in ",
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


@mutant(
    "C16",
    cases.PLAIN[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of 0.25, most in mixer.weight (0.75",
    world_size=3,
)
def division_by_a_power_of_two(backend: Any) -> Iterator[None]:
    """Ranks are summed in pairs, and so is the divisor, as if there were four of three."""
    with scaled_loss(backend, 3 / 4):
        yield


@mutant("C25", cases.ADAMW, words="391 elements to be reduced in step 1, saw 1173")
def optimizer_state_reduced(backend: Any) -> Iterator[None]:
    """Moments are averaged after every update, although they are equal on all ranks."""

    def after(optimizer: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(backend.all_reduce(state[name]) / backend.world_size)

    with around_step(backend, lambda optimizer: None, after):
        yield
