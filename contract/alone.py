"""Runs the trainings of a case under the single-process backend, in this process, to exchange states with a group."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from backends.interface import BackendOptions
from backends.registry import reference_backend
from contract.case import INIT_LOSS_SCALE, Case
from contract.scenes import Scenery, train_once

# Keyed by case, world size, device and dtype; it is the same for every adapter.
_TRAINED: dict[tuple[str, int, str, bool], dict[str, Any]] = {}


def train_alone(case: Case, world_size: int, *, device: str, float64: bool = True) -> dict[str, Any]:
    """Runs the first training of a case with the batches of a group, and returns what was observed and its state."""
    key = (case.name, world_size, device, float64)
    if key not in _TRAINED:
        _TRAINED[key] = _train(case, world_size, 0, None, device=device, float64=float64)
    return _TRAINED[key]


def continue_alone(
    case: Case, world_size: int, state: Mapping[str, Any], *, device: str, float64: bool = True
) -> dict[str, Any]:
    """Runs the second training of a case, which continues the first, from a saved state."""
    return _train(case, world_size, 1, state, device=device, float64=float64)


def _train(
    case: Case, world_size: int, number: int, state: Mapping[str, Any] | None, *, device: str, float64: bool
) -> dict[str, Any]:
    backend = reference_backend(
        BackendOptions(precision=case.precision, device=device, init_loss_scale=INIT_LOSS_SCALE)
    )
    num_threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            scenery = Scenery(1, world_size, 0, Path(directory), {}, float64)
            return train_once(backend, case, case.trainings[number], scenery, {}, state)
    finally:
        torch.set_num_threads(num_threads)
        torch.set_rng_state(random_state)
