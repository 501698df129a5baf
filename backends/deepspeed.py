"""DeepSpeed (https://deepspeed.readthedocs.io): ZeRO stage 1 or 2, where each rank updates a part of the weights.

Idioms from https://www.deepspeed.ai/docs/config-json/. All ranks have all weights. DeepSpeed lays the parameters of
each group of the optimizer out in one vector, of which each rank updates a part and holds the state; then it gathers
them. In stage 2, a rank also keeps no more of the averaged gradients than this part.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from backends.deepspeed_settings import DeepSpeedSettings
from backends.flat_parts import FlatPart, PartsOptimizer, Place
from backends.interface import BackendOptions, StepResult, UnsupportedError
from backends.memory_layout import make_contiguous
from backends.registry import BACKENDS
from backends.torch_group import TorchGroupBackend, broadcast_from_first


class DeepSpeedBackend(TorchGroupBackend):
    name = "deepspeed"
    capabilities = BACKENDS["deepspeed"].capabilities
    Settings = DeepSpeedSettings

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._deepspeed = _import_library(options.device)
        # It would make another group of all ranks, whose timeout is not ours but half an hour.
        self._deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD
        self._deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        _require_float32(model)
        make_contiguous(model, optimizer)  # it broadcasts the bytes of a weight as they are
        broadcast_from_first(model.buffers())  # it broadcasts parameters only
        saved = optimizer.state_dict()
        optimizer.state.clear()
        groups = [list(group["params"]) for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group]
        config = self._config(sum(parameter.numel() for parameter in parameters))
        self.engine, *_ = self._deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.optimizer = PartsOptimizer(optimizer, [[_place(one) for one in group] for group in groups])
        if saved["state"]:
            parts = [part for group in self.optimizer.param_groups for part in group["params"]]
            state = {
                number: {name: _cut(value, parts[number]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            self.optimizer.load_state_dict({**saved, "state": state})
        self._accumulation, self._is_last = ExitStack(), True
        self._with_gradient: set[torch.Tensor] = set()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._with_gradient.add)
        return self.engine, self.optimizer

    @override
    def autocast(self) -> AbstractContextManager[Any]:
        # The engine's forward pass enters its own; this one is for what the task computes of its outputs.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.options.precision == "bf16")

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # Otherwise stage 2 would reduce in each micro-batch, and stage 1 would forget all of them but the last.
        if not self.engine.inside_no_sync_ctxt:
            self._accumulation.enter_context(self.engine.coalesce_grad_reduction())
        self._is_last = False
        try:
            yield
        finally:
            self._is_last = True

    @override
    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        if self._is_last:
            self._accumulation.close()  # reduces what has added up

    @override
    def has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._with_gradient  # none is left in the parameter itself

    @override
    def gradients_apart(self) -> list[torch.Tensor]:
        return [gradient for group in self.engine.optimizer.averaged_gradients.values() for gradient in group]

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        # DeepSpeed's own norm takes a reduction for each group, and it skips an update that is not finite, unasked.
        zero, gradients = self.engine.optimizer, self.gradients_apart()
        squared = torch.nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(squared)
        grad_norm = squared.sqrt()
        if max_grad_norm > 0:
            torch._foreach_mul_(gradients, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        skipped = self.must_skip(grad_norm)
        if skipped:
            zero.averaged_gradients = {}
            zero.zero_grad()
        else:
            self.optimizer.give_settings()
            self.engine.step()
            self.optimizer.follow()
        self._with_gradient.clear()
        return StepResult(grad_norm, skipped)

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    @override
    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, FlatPart) else tensor

    @override
    def shard(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return like.cut(whole) if isinstance(like, FlatPart) and not isinstance(whole, FlatPart) else whole

    @override
    def load_weights(self, model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
        super().load_weights(model, weights)
        self.engine.optimizer.refresh_fp32_params()  # the copy of this rank's part, which the optimizer updates

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @override
    def effective_settings(self) -> dict[str, Any]:
        zero = self.engine.optimizer
        return {
            "transport": dist.get_backend(),
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "reduce_bucket_size": zero.reduce_bucket_size,
        }

    @override
    def shutdown(self) -> None:
        self.engine.destroy()
        for parameter in self.engine.module.parameters():
            parameter.data = parameter.data.clone()  # no longer one vector, which safetensors would refuse to save
        del self.engine, self.optimizer
        self.leave_group()

    def _config(self, num_elements: int) -> dict[str, Any]:
        """Returns DeepSpeed's configuration, given how many elements are trained."""
        settings = self.options.settings
        return {
            "train_micro_batch_size_per_gpu": 1,  # which it asks for and does not use
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": settings.zero_stage if isinstance(settings, DeepSpeedSettings) else 1,
                "compute_grad_norm": False,
                "reduce_bucket_size": num_elements,  # what it allocates in each step
            },
            "torch_autocast": {
                "enabled": self.options.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],  # their gradients would be averaged in this precision
            },
        }


def _import_library(device: str) -> Any:
    """Imports DeepSpeed, which reads variables meanwhile."""
    for name in [name for name in os.environ if name.startswith("DS_")]:
        del os.environ[name]
    os.environ |= {"DS_ACCELERATOR": device, "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"]}
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It would build a library for memory that ranks share, and wait without end for a build that was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _cut(value: Any, part: FlatPart) -> Any:
    return part.cut(value) if isinstance(value, torch.Tensor) and value.shape == part.shape else value


def _place(parameter: torch.nn.Parameter) -> Place:
    mapping = cast(Any, parameter)._hp_mapping
    if mapping is None:  # this rank has no element of it
        return Place(0, 0, 0, parameter.shape)
    own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Place(own.start, whole.start, own.numel, parameter.shape)


def _require_float32(model: torch.nn.Module) -> None:
    """Refuses what DeepSpeed would convert, or cannot send.

    Raises:
        UnsupportedError: It names the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UnsupportedError(
                f"deepspeed cannot train {name}, which is {parameter.dtype}: it would update a copy in float32; "
                "make it float32, or use ddp"
            )
        if parameter.ndim == 0:
            raise UnsupportedError(f"deepspeed cannot send {name}, a single number; give it a dimension, or use ddp")
