"""Faults of random numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant
from training import data


@mutant("C34", cases.DROPOUT, words="rank 1: expected other masks than on rank 0, saw 13 of 13 equal masks")
def same_noise_on_all_ranks(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda seed, purpose, *key: original(seed, purpose, *key[1:])

    with replaced(data, "random_seed", mutated):
        yield


@mutant("C35", cases.DROPOUT, words="the masks in step 1: [[")
def noise_that_does_not_repeat(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        return lambda seed, purpose, *key: original(seed, purpose, *key, *([time.monotonic_ns()] if key else []))

    with replaced(data, "random_seed", mutated):
        yield


@mutant("C34", cases.DROPOUT, words="a different mask in every micro-batch, saw ")
def same_noise_until_the_last_micro_batch(backend: Any) -> Iterator[None]:
    state: list[Any] = []

    def no_sync(original: Any) -> Any:
        def mutated() -> Any:
            if not state:
                state.append(torch.get_rng_state())
            torch.set_rng_state(state[0])
            return original()

        return mutated

    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> Any:
            state.clear()
            return original(max_grad_norm)

        return mutated

    with replaced(backend, "no_sync", no_sync), replaced(backend, "step", step):
        yield
