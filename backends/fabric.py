"""Lightning Fabric (https://lightning.ai/docs/fabric/stable/), within Lockstep's own loop.

Fabric's DDP strategy wraps the model. Fabric could start the ranks, too, but these are already there: the environment
of torchrun, which the starters set, tells it so. Its own data loaders and seeds are not used.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from typing_extensions import override

from backends.bucket_settings import BucketSettings, bucket_arguments
from backends.compression import compress_gradients, compression_of
from backends.embedding_rows import rows_sent_by, send_used_rows
from backends.interface import Backend, BackendOptions, StepResult
from backends.registry import BACKENDS
from backends.torch_group import all_reduce_in_group, broadcast_from_first, transport_for


class FabricBackend(Backend):
    name = "fabric"
    capabilities = BACKENDS["fabric"].capabilities
    Settings = BucketSettings

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        for name in [name for name in os.environ if name.startswith("LT_")]:
            del os.environ[name]  # LT_PRECISION and the like would silently take the place of the arguments below
        num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        self._scaler: torch.amp.GradScaler | None = None
        if options.precision == "fp16":
            self._scaler = torch.amp.GradScaler(options.device, init_scale=options.init_loss_scale)
            self._fresh_scale = self._scaler.state_dict()
        plugins: list[Any] = [TorchElasticEnvironment()]
        if options.precision == "bf16":
            plugins.append(MixedPrecision("bf16-mixed", device=options.device))
        elif self._scaler is not None:
            plugins.append(MixedPrecision("16-mixed", device=options.device, scaler=self._scaler))
        self.fabric = Fabric(
            accelerator=options.device,
            devices=num_local_ranks,
            num_nodes=int(os.environ["WORLD_SIZE"]) // num_local_ranks,
            plugins=plugins,
            strategy=DDPStrategy(
                process_group_backend=transport_for(options.device),
                timeout=timedelta(seconds=options.timeout_seconds),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=options.find_unused_parameters,
                **bucket_arguments(options.settings),
            ),
        )
        self.fabric.launch()
        self.rank, self.local_rank = self.fabric.global_rank, self.fabric.local_rank
        self.world_size, self.device = self.fabric.world_size, self.fabric.device

    @classmethod
    @override
    def can_pretend(cls, options: BackendOptions) -> bool:
        return True

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        # With broadcast_buffers=False the wrapper leaves buffers alone at the start, too.
        broadcast_from_first(model.buffers())
        if self._scaler is not None:  # which is Fabric's for as long as it lives
            self._scaler.load_state_dict(self._fresh_scale)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        wrapped = cast(Any, self.model)._forward_module
        compress_gradients(wrapped, self.options)
        send_used_rows(wrapped, self.options)
        return self.model, self.optimizer

    @override
    def autocast(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.fabric.autocast())

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.fabric.no_backward_sync(self.model))

    @override
    def backward(self, loss: torch.Tensor) -> None:
        self.fabric.backward(loss, model=self.model)

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        # This unscales the gradients first; an infinite threshold only measures their norm.
        threshold = max_grad_norm or math.inf
        grad_norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=threshold, error_if_nonfinite=False)
        grad_norm = cast(torch.Tensor, grad_norm)
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        skipped = self._scaler is None and self.must_skip(grad_norm)
        if not skipped:
            self.optimizer.step()
            skipped = self._scaler is not None and self._scaler.get_scale() < scale
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        # Fabric.all_reduce has no minimum or maximum, so this uses the process group that it made.
        return all_reduce_in_group(tensor, op)

    @override
    def barrier(self) -> None:
        self.fabric.barrier()

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict() if self._scaler is not None else {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state)

    @override
    def effective_settings(self) -> dict[str, Any]:
        wrapped = cast(Any, self.model)._forward_module
        return {
            "transport": dist.get_backend(),
            "precision": str(self.fabric._precision.precision),
            "bucket_bytes": wrapped.bucket_bytes_cap,
            "gradient_as_bucket_view": wrapped.gradient_as_bucket_view,
            "find_unused_parameters": wrapped.find_unused_parameters,
            **compression_of(wrapped, self.options),
            **rows_sent_by(wrapped, self.options),
        }

    @override
    def shutdown(self) -> None:
        # A wrapper that is still left when its group is destroyed sometimes aborts the process.
        del self.model, self.optimizer
        self.barrier()
        dist.destroy_process_group()
