"""Random streams: each is seeded anew from what it is for and where in the training it is used.

No stream carries a state from one step to the next, so a resumed run draws what the unbroken one would have drawn.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import torch

# What a random stream is for, so that no two streams share a seed.
WEIGHTS, DATA, DROPOUT, EVALUATION = range(4)
# The seeds of so many steps are mixed at once. Between two steps, when caches hold what the model needs, mixing one
# takes several times as long.
_STEPS_AHEAD = 16


def random_seed(*key: int) -> int:
    """Mixes integers, such as (seed, purpose, rank, step), into one 63-bit seed."""
    # Shifted as Python's integer, since numpy takes as long to shift one of its own as for all the rest.
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


def seed_all(*key: int) -> None:
    """Seeds the random generators of torch, numpy and Python with the mixed key."""
    _seed_generators(random_seed(*key))


def seed_micro_batch(*stream: int, step: int, micro_step: int) -> None:
    """Does what `seed_all(*stream, step, micro_step)` does, faster if it is called for one step after the other."""
    _seed_generators(_seeds_of_steps(stream, step // _STEPS_AHEAD, micro_step)[step % _STEPS_AHEAD])


@lru_cache(maxsize=4096)
def _seeds_of_steps(stream: tuple[int, ...], block: int, micro_step: int) -> list[int]:
    first = block * _STEPS_AHEAD
    return [random_seed(*stream, step, micro_step) for step in range(first, first + _STEPS_AHEAD)]


def _seed_generators(seed: int) -> None:
    # torch.manual_seed also asks for devices that do not exist, which takes milliseconds where there is no GPU.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
