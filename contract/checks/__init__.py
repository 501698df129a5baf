"""The clauses of the contract, by subject; importing this package registers them all."""

from contract.checks import (
    batch_norm,
    compression,
    data,
    jobs,
    precision,
    randomness,
    setup,
    state,
    traffic,
    trajectory,
    unused,
    world,
)

__all__ = [
    "batch_norm",
    "compression",
    "data",
    "jobs",
    "precision",
    "randomness",
    "setup",
    "state",
    "traffic",
    "trajectory",
    "unused",
    "world",
]
