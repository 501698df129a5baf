"""The whole of a model of which each rank may hold a part."""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import torch

from backends.interface import Backend
from tasks.interface import Task
from training.world import add_to_digest, weights_digest


class WholeModel(NamedTuple):
    """A model with whole weights, on rank 0; elsewhere the rank's own.

    Attributes:
        model: The task's module.
        digest: That of the whole weights, on every rank.
    """

    model: torch.nn.Module
    digest: str


def whole_model(backend: Backend, task: Task, module: torch.nn.Module) -> WholeModel:
    """Makes the parts of all ranks whole, one tensor after the other; where each rank has all, nothing is sent.

    Args:
        backend: The backend; where it shards weights, all ranks call this.
        task: Builds the model that rank 0 gets the weights in.
        module: The task's module, as it was trained.

    Raises:
        RuntimeError: The task builds another model than before, or another rank is lost.
    """
    if not backend.capabilities.shards_weights:
        return WholeModel(module, weights_digest(module))
    model, digest = task.build_model() if backend.rank == 0 else None, hashlib.sha256()
    tensors = sorted([*module.named_parameters(), *module.named_buffers()], key=lambda item: item[0])
    for name, part in tensors:
        tensor = backend.whole(part.detach()).cpu()
        add_to_digest(digest, name, tensor)
        if model is not None:
            _put(model, name, tensor)
    return WholeModel(module if model is None else model, digest.hexdigest())


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor in its place; a buffer may have grown since the model was built."""
    places = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    if name not in places:
        raise RuntimeError(f"the task builds another model the second time: it has no {name}")
    if places[name].shape == tensor.shape:
        places[name].data.copy_(tensor)
    else:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, tensor)
