"""Faults of backends under which each rank holds all weights and updates a part of them, on DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from backends.flat_parts import FlatPart
from backends.interface import Backend
from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant

UPDATES_PARTS = ("deepspeed",)


@mutant("C16", cases.PLAIN[1], words="of the reference, saw a difference of", of=UPDATES_PARTS)
def the_last_micro_batch_wins(backend: Any) -> Iterator[None]:
    """Nobody tells DeepSpeed which micro-batch ends a step."""
    with mock.patch.object(backend, "no_sync", nullcontext):
        yield


@mutant("C19", cases.PLAIN[0], words="norm", of=UPDATES_PARTS)
def norm_of_the_updated_part(backend: Any) -> Iterator[None]:
    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> Any:
            with mock.patch.object(dist, "all_reduce"):
                return original(max_grad_norm)

        return mutated

    with replaced(backend, "step", step):
        yield


@mutant("C25", cases.PLAIN[0], words="elements to be reduced in step 1, saw", of=UPDATES_PARTS)
def whole_gradients_are_reduced_first(backend: Any) -> Iterator[None]:
    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> Any:
            for parameter in backend.engine.module.parameters():
                dist.all_reduce(torch.zeros_like(parameter))
            return original(max_grad_norm)

        return mutated

    with replaced(backend, "step", step):
        yield


@mutant("C25", cases.PLAIN[0], words="elements updated by each rank, saw", of=UPDATES_PARTS)
def each_rank_updates_everything(backend: Any) -> Iterator[None]:
    """A rank's part is the whole, and needs nobody else to be made whole."""
    everything = {name: lambda part: torch.zeros(part.shape) for name in ("to_local", "full_tensor")}
    with mock.patch.multiple(FlatPart, **everything):
        yield


@mutant("C27", cases.PLAIN[1], words="elements of weights to be gathered in step 3, saw", of=UPDATES_PARTS)
def weights_are_gathered_twice(backend: Any) -> Iterator[None]:
    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> Any:
            result = original(max_grad_norm)
            backend.engine.optimizer.update_lp_params()
            return result

        return mutated

    with replaced(backend, "step", step):
        yield


@mutant("C39", cases.STATE, words="of the training that was not interrupted, saw a difference of", of=UPDATES_PARTS)
def moments_of_other_elements(backend: Any) -> Iterator[None]:
    """Each rank goes on with the optimizer's state of elements that it does not update."""
    with replaced(FlatPart, "cut", lambda original: lambda part, whole: original(part, whole.flip(0))):
        yield


@mutant("C39", cases.STATE, words="of the training that was not interrupted, saw a difference of", of=UPDATES_PARTS)
def the_updated_copy_is_an_old_one(backend: Any) -> Iterator[None]:
    """Weights are loaded into the model, and not into the copy that the optimizer updates."""

    def load_weights(original: Any) -> Any:
        return lambda model, weights: Backend.load_weights(backend, model, weights)

    with replaced(backend, "load_weights", load_weights):
        yield


@mutant("C41", cases.STATE, words="weights after step", of=UPDATES_PARTS)
def state_of_the_part_of_rank_0(backend: Any) -> Iterator[None]:
    """As a rank saves that does not know that the others hold the rest."""

    def full_tensor(original: Any) -> Any:
        def mutated(part: FlatPart) -> torch.Tensor:
            return original(part if dist.get_rank() == 0 else part.of(torch.zeros_like(part._flat)))

        return mutated

    with replaced(FlatPart, "full_tensor", full_tensor):
        yield
