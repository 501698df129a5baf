"""Backends and loops that are broken on purpose, each in one way that has been seen in published code.

A mutant is applied to a live adapter and to the loop of its process while one case runs. The check that it names must
then fail, in the words that it names: a check that fails for another reason, or for every adapter, catches nothing.
Importing this package registers all mutants.
"""

from tests.mutants import (
    batch_norm,
    compression,
    data,
    flat_parts,
    gradients,
    precision,
    randomness,
    setup,
    sharding,
    state,
    steps,
    tensors,
    unused,
    world,
)
from tests.mutants.mutant import MUTANTS, REPLICATED, Mutant

__all__ = [
    "MUTANTS",
    "REPLICATED",
    "Mutant",
    "batch_norm",
    "compression",
    "data",
    "flat_parts",
    "gradients",
    "precision",
    "randomness",
    "setup",
    "sharding",
    "state",
    "steps",
    "tensors",
    "unused",
    "world",
]
