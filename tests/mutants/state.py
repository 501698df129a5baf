"""Faults of saved state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant
from training.state import TrainingState


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
    "C40", cases.STATE, words="weights after step 4 within 1e-09 of the reference, saw a difference of 0.011, most in "
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


@mutant("C42", cases.STATE, stops={"*": "only plain data and tensors may be saved, but this case has saved a pathlib"})
def state_that_runs_code(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"path": Path("anywhere")}):
        yield


@mutant("C42", cases.STATE, words="expected a loss scaler that JSON can hold, saw Object of type Tensor is not JSON")
def state_that_no_checkpoint_can_hold(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"steps": torch.tensor(3)}):
        yield


@mutant("C42", cases.STATE, words="rank 1: expected the saved loss scaler of rank 0: {'rank': 0}, saw {'rank': 1}")
def state_of_the_rank(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"rank": backend.rank}):
        yield


@mutant(
    "C47", cases.WEIGHTS_OF_RANK_0[0], words="rank 0: expected `weights` and `state_dict` to return on rank 0 alone"
)
def ranks_wait_for_each_other_before_saving(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def weights(model: Any) -> Any:
            backend.barrier()
            return original(model)

        return weights

    with replaced(backend, "weights", mutated):
        yield


@mutant("C41", cases.STATE_FP16, words="the loss scaler as the single-process backend saves it: {'scale': 512.0")
def count_of_good_steps_not_saved(backend: Any) -> Iterator[None]:
    with replaced(backend, "state_dict", lambda original: lambda: original() | {"_growth_tracker": 0}):
        yield


@mutant("C39", cases.STATE_VARIED, words="the buffers after step 4 of the training that was not interrupted")
def buffers_not_restored(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def load_weights(model: Any, weights: Any) -> None:
            own = dict(backend.unwrap(model).named_buffers())
            original(model, {name: own.get(name, weight) for name, weight in weights.items()})

        return load_weights

    with replaced(backend, "load_weights", mutated):
        yield


@mutant("C39", cases.STATE, words="of the training that was not interrupted, saw a difference of")
def moments_in_another_layout(backend: Any) -> Iterator[None]:
    """A fused optimizer then takes other elements of them for those of the parameter."""

    def own_part(original: Any) -> Any:
        def turned(state: Any, value: Any, parameter: Any) -> Any:
            own = original(state, value, parameter)
            return own.t().contiguous().t() if getattr(own, "ndim", 0) == 2 else own

        return turned

    with replaced(TrainingState, "_own_part", own_part):
        yield


@mutant(
    "C47", cases.WEIGHTS_OF_RANK_0[2], words="rank 0: expected `weights` and `state_dict` to return on rank 0 alone"
)
def loss_scale_agreed_before_saving(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def state_dict() -> Any:
            state = original()
            scale = backend.all_reduce(torch.tensor(state["scale"]), "min")
            return state | {"scale": float(scale)}

        return state_dict

    with replaced(backend, "state_dict", mutated):
        yield


@mutant("C39", cases.STATE_BF16, words="weights after step 4 of the training that was not interrupted")
def weights_saved_in_half_precision(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda model: {
            name: weight.bfloat16() if weight.is_floating_point() else weight
            for name, weight in original(model).items()
        }

    with replaced(backend, "weights", mutated):
        yield


@mutant("C39", cases.STATE_FP16, words="loss scales in step 4: [512.0], saw [1024.0]")
def scale_loaded_for_the_first_backward_only(backend: Any) -> Iterator[None]:
    """The scaler makes its tensors of these numbers in its first backward pass, which lies before."""

    def load_state_dict(state: Any) -> None:
        backend.scaler._init_scale = state["scale"]
        backend.scaler._init_growth_tracker = state["_growth_tracker"]

    with mock.patch.object(backend, "load_state_dict", load_state_dict):
        yield
