"""Faults of backends under which each rank holds a part of each weight, on torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant
from training.state import TrainingState

SHARDED = ("fsdp2",)


@mutant("C07", cases.PLAIN[0], words="weight", of=SHARDED)
def parts_of_different_models(backend: Any) -> Iterator[None]:
    """Each rank contributes the rows of a model of its own."""
    with mock.patch.object(dist, "broadcast"):
        yield


@mutant("C08", cases.PREPARED_OPTIMIZER, words="state", of=SHARDED)
def state_of_the_unsharded_parameters_is_lost(backend: Any) -> Iterator[None]:
    def setup(original: Any) -> Any:
        def mutated(model: Any, optimizer: Any) -> Any:
            optimizer.state.clear()
            return original(model, optimizer)

        return mutated

    with replaced(backend, "setup", setup):
        yield


@mutant("C16", cases.LAYERED, words="of the reference, saw a difference of", of=SHARDED)
def sums_of_one_layer_are_not_divided(backend: Any) -> Iterator[None]:
    def setup(original: Any) -> Any:
        def mutated(model: Any, optimizer: Any) -> Any:
            wrapped, wrapped_optimizer = original(model, optimizer)
            wrapped.layers[1].set_gradient_divide_factor(1.0)
            return wrapped, wrapped_optimizer

        return mutated

    with replaced(backend, "setup", setup):
        yield


@mutant("C19", cases.PLAIN[0], words="norm", of=SHARDED)
def norm_of_the_own_part(backend: Any) -> Iterator[None]:
    with mock.patch.object(dist, "all_reduce"):
        yield


# The ranks that step have their gradients gathered for the check, and wait for those that skip: until one of them has
# waited for too long, which the others see as a connection that it closed. Gloo names its transport in both messages.
@mutant("C30", cases.INFINITE_GRADIENT_FP16, stops={"*": "/gloo/transport/"}, of=SHARDED)
def overflow_of_a_part_is_kept_from_the_others(backend: Any) -> Iterator[None]:
    """Each rank looks at its own part of the gradients alone."""

    def own_part(operation: Any, args: Any, kwargs: Any) -> None:
        gradients, *found_and_scale = args
        operation([gradient.to_local() for gradient in gradients], *found_and_scale)

    # What torch has a scaler call for gradients that are parts.
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    with mock.patch.dict(DTensor._op_dispatcher._custom_op_handlers, {unscale: own_part}):
        yield


@mutant("C26", cases.PLAIN[1], words="no reduction before the last micro-batch of step 1, saw", of=SHARDED)
def scattering_in_every_micro_step(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "no_sync", nullcontext):
        yield


@mutant("C25", cases.PLAIN[0], words="elements to be reduced in step 1, saw", of=SHARDED)
def gradients_are_reduced_once_more(backend: Any) -> Iterator[None]:
    """As a backend does that shards the optimizer alone, and averages whole gradients before."""

    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> Any:
            whole = sum(parameter.numel() for parameter in backend.model.parameters())
            dist.all_reduce(torch.zeros(whole, dtype=torch.float64))
            return original(max_grad_norm)

        return mutated

    with replaced(backend, "step", step):
        yield


@mutant("C27", cases.LAYERED, words="elements of weights to be gathered in step 3, saw", of=SHARDED)
def weights_are_gathered_again_and_again(backend: Any) -> Iterator[None]:
    def backward(original: Any) -> Any:
        def mutated(loss: torch.Tensor) -> None:
            for parameter in [one for group in backend.optimizer.param_groups for one in group["params"]] * 2:
                backend.whole(parameter)
            original(loss)

        return mutated

    with replaced(backend, "backward", backward):
        yield


@mutant("C39", cases.STATE, words="of the training that was not interrupted, saw a difference of", of=SHARDED)
def moments_of_other_rows(backend: Any) -> Iterator[None]:
    """Each rank goes on with the optimizer's state of rows that it does not hold."""

    def own_part(original: Any) -> Any:
        return lambda state, value, parameter: original(state, value.flip(0), parameter)

    with replaced(TrainingState, "_own_part", own_part):
        yield


@mutant("C39", cases.STATE, words="of the training that was not interrupted, saw a difference of", of=SHARDED)
def weights_of_other_rows(backend: Any) -> Iterator[None]:
    def load_weights(original: Any) -> Any:
        return lambda model, weights: original(model, {name: weight.flip(0) for name, weight in weights.items()})

    with replaced(backend, "load_weights", load_weights):
        yield
