"""Random streams: each is seeded anew from what it is for and where in the training it is used.

No stream carries a state from one step to the next, so a resumed run draws what the unbroken one would have drawn.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

# What a random stream is for, so that no two streams share a seed.
WEIGHTS, DATA, DROPOUT, EVALUATION = range(4)


def random_seed(*key: int) -> int:
    """Mixes integers, such as (seed, purpose, rank, step), into one 63-bit seed."""
    # Some seeds are mixed in each step, and numpy's SeedSequence takes nine times as long.
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds the random generators of torch, numpy and Python with what `random_seed` returned."""
    # torch.manual_seed also asks for devices that do not exist, which takes milliseconds where there is no GPU.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
