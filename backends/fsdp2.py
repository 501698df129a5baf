"""PyTorch's FSDP2: `torch.distributed.fsdp.fully_shard`, under which each rank holds a part of every weight.

Idioms from https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. A weight of n rows is cut into parts
of rows, one for each rank, and so are its gradient and its optimizer state. Before a layer computes, its weights are
gathered from all ranks; after its backward pass, its gradients are summed, and each rank gets its own part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from backends.fsdp2_settings import FSDP2Settings
from backends.interface import StepResult, UnsupportedError
from backends.memory_layout import make_contiguous
from backends.registry import BACKENDS
from backends.torch_amp import TorchAmpBackend
from backends.torch_group import TorchGroupBackend, broadcast_from_first


class FSDP2Backend(TorchGroupBackend, TorchAmpBackend):
    name = "fsdp2"
    capabilities = BACKENDS["fsdp2"].capabilities
    Settings = FSDP2Settings

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        _require_parts(model)
        make_contiguous(model, optimizer)  # fully_shard refuses other parameters
        broadcast_from_first((*model.parameters(), *model.buffers()))  # fully_shard takes each rank's rows as they are
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._reshards)
        # The weights of the root are needed until the end of the forward pass, and first in the backward pass.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in _sharded_modules(model):
            # gloo's average was a sum for a while (pytorch/pytorch#162338); a sum that is divided afterwards never was.
            module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        self._follow(optimizer, dict(model.named_parameters()), names)
        self.prepare_amp(model, optimizer)
        return model, optimizer

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        self.scaler.unscale_(self.optimizer)  # an overflow in the part of one rank is known to all afterwards
        gradients = [parameter.grad for parameter in self.model.parameters()]
        parts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        # The squares of the parts' norms add up to that of the whole.
        squared = torch.nn.utils.get_total_norm(parts) ** 2
        dist.all_reduce(squared)
        grad_norm = squared.sqrt()
        if max_grad_norm > 0:
            # As torch.nn.utils.clip_grads_with_norm_ does, which takes parameters, and not parts of gradients.
            torch._foreach_mul_(parts, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        skipped = self.update(grad_norm)
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    @override
    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @override
    def shard(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor) or isinstance(whole, DTensor):
            return whole
        # Without a source rank, each rank cuts its part out of what it has.
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements, src_data_rank=None)

    @override
    @contextmanager
    def evaluation(self, model: torch.nn.Module) -> Iterator[None]:
        try:
            yield
        finally:
            # No backward pass comes, after which weights that were kept whole would be parts again.
            for module in _sharded_modules(model):
                module.reshard()

    @override
    def effective_settings(self) -> dict[str, Any]:
        return {
            "transport": dist.get_backend(),
            "reshard_after_forward": self._reshards,
            "sharded_layers": len(_sharded_modules(self.model)) - 1,
        }

    @override
    def shutdown(self) -> None:
        self.release()
        self.leave_group()

    def _follow(
        self, optimizer: torch.optim.Optimizer, sharded: dict[str, torch.nn.Parameter], names: dict[int, str]
    ) -> None:
        """Has an optimizer update the sharded parameters, each in the place of the one that it was made of."""
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                group["params"][place] = own = sharded[names[id(parameter)]]
                if parameter in optimizer.state:
                    optimizer.state[own] = {
                        name: self.shard(value, own) if torch.is_tensor(value) and value.shape == own.shape else value
                        for name, value in optimizer.state.pop(parameter).items()
                    }

    @property
    def _reshards(self) -> bool:
        settings = self.options.settings
        return not isinstance(settings, FSDP2Settings) or settings.reshard_after_forward


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules that are gathered one after the other: those of lists, such as a transformer's layers.

    Those inside others come first, as fully_shard asks for. A list in a list computes nothing itself.
    """
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = [layer for layers in reversed(lists) for layer in layers]
    return [layer for layer in layers if not isinstance(layer, _CONTAINERS) and any(True for _ in layer.parameters())]


_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _require_parts(model: torch.nn.Module) -> None:
    """Refuses what fully_shard cannot cut, or cannot send together.

    Raises:
        UnsupportedError: It names the parameter.
    """
    layers = {id(layer) for layer in _layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    owners: dict[int, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        if owners.setdefault(id(parameter), owner) != owner:
            raise UnsupportedError(f"fsdp2 cannot shard {name}, which a layer shares with another module; use ddp")
        if parameter.ndim == 0:
            raise UnsupportedError(f"fsdp2 cannot shard {name}, a single number; give it a dimension, or use ddp")
        if parameter.requires_grad and dtypes.setdefault(owner, parameter.dtype) != parameter.dtype:
            raise UnsupportedError(
                f"fsdp2 cannot shard {name}, which is {parameter.dtype} among parameters in {dtypes[owner]}; "
                "give them one dtype, or use ddp"
            )
