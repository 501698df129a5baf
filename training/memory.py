"""What the memory of a rank holds: parameters, gradients, optimizer state, buffers, and what a backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from records.record import MemoryRecord
from training.hooks import Hooks
from training.loop import Trainer


class MemoryMeter(Hooks):
    """Counts bytes of tensors: in the first step of this process, what is gone later; at its end, the rest."""

    def __init__(self, trainer: Trainer) -> None:
        self._state, self._backend = trainer.state, trainer.backend
        config = trainer.config
        # The hooks slow a forward pass down, and a compiled model would be compiled again for them. They see one thread
        # alone, and a process that computes on several devices has a thread for each.
        is_seen = not config.torch_compile and trainer.backend.num_devices == 1
        self._counts_activations = (config.diagnose or config.trace > 0) and is_seen
        self._activations: dict[int, torch.UntypedStorage] = {}
        self._activation_bytes = 0
        self._gradient_bytes: int | None = None
        self._hooks = ExitStack()

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if self._gradient_bytes is not None or step == 0:  # step 0 is the rehearsal of a resumed run
            return
        if phase == "forward" and self._counts_activations:
            self._activations = {}
            self._hooks.enter_context(saved_tensors_hooks(self._note, lambda tensor: tensor))
        elif phase == "backward":
            self._hooks.close()
            held = sizes_of_storages([*self._state.module.parameters(), *self._state.module.buffers()])
            # What was gathered for a layer alone is empty by now.
            sizes = {address: storage.nbytes() for address, storage in self._activations.items()}
            num_bytes = sum(size for address, size in sizes.items() if address not in held)
            self._activation_bytes = max(self._activation_bytes, num_bytes)
            self._activations = {}
        elif phase == "update":
            parameters = [*self._state.module.parameters(), *_updated(self._state.optimizer)]
            gradients = [one.grad for one in parameters if one.grad is not None]
            self._gradient_bytes = held_bytes([*gradients, *self._backend.gradients_apart()])

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes what autograd keeps, and keeps it as it is."""
        self._activations |= {storage.data_ptr(): storage for storage in _storages_of([tensor])}
        return tensor

    def record(self) -> MemoryRecord:
        """Returns what was counted; to be called after the training."""
        model, optimizer = self._state.module, self._state.optimizer
        parameters = sizes_of_storages(model.parameters())
        # Where training keeps a copy of the parameters with more digits, the optimizer updates the copy.
        copies = {
            address: size
            for address, size in sizes_of_storages(_updated(optimizer)).items()
            if address not in parameters
        }
        state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        return MemoryRecord(
            parameter_bytes=sum(parameters.values()),
            buffer_bytes=held_bytes(model.buffers()),
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=sum(copies.values()) + held_bytes(state),
            activation_bytes=self._activation_bytes if self._counts_activations else None,
        )


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the storages of tensors; one that several of them share counts once."""
    return sum(sizes_of_storages(tensors).values())


def sizes_of_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Returns the sizes of storages in bytes, by address."""
    return {storage.data_ptr(): storage.nbytes() for storage in _storages_of(tensors)}


def _storages_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yields storages; a sparse gradient has two, other layouts are left out."""
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a tensor that is spread over ranks
        parts = (own._indices(), own._values()) if own.layout is torch.sparse_coo else (own,)
        yield from (part.untyped_storage() for part in parts if part.layout is torch.strided)


def _updated(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
