"""Hugging Face Accelerate (https://huggingface.co/docs/accelerate), within Lockstep's own loop.

Accelerate can own accumulation, the data loader and the schedule. Here it owns none of them:
its accumulation divides every window by the configured length, also a short last one, a prepared
loader pads with repeated samples, and a prepared scheduler steps once per rank. What remains is
`prepare(model, optimizer)`, `backward`, `clip_grad_norm_` and `step`.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    broadcast,
)
from typing_extensions import override

from backends.bucket_settings import BucketSettings, bucket_arguments
from backends.capabilities import UnsupportedError
from backends.compression import compress_gradients, compression_of
from backends.embedding_rows import rows_sent_by, send_used_rows
from backends.interface import Backend, BackendOptions, StepResult
from backends.registry import BACKENDS
from backends.torch_group import all_reduce_in_group, transport_for

_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


class AccelerateBackend(Backend):
    name = "accelerate"
    capabilities = BACKENDS["accelerate"].capabilities
    Settings = BucketSettings
    signs = BACKENDS["accelerate"].signs

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        # Accelerate would ask for NCCL, and for the GPU that has the number of the local rank.
        self._shares_gpu = options.device == "cuda" and transport_for("cuda") == "gloo"
        if self._shares_gpu:
            os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        self.accelerator = Accelerator(
            cpu=options.device == "cpu",
            mixed_precision=_MIXED_PRECISION[options.precision],
            gradient_accumulation_steps=1,
            kwargs_handlers=[
                InitProcessGroupKwargs(
                    # "nccl" is the default, and means that Accelerate chooses.
                    backend="gloo" if self._shares_gpu else "nccl",
                    timeout=timedelta(seconds=options.timeout_seconds),
                ),
                GradScalerKwargs(init_scale=options.init_loss_scale),
                DistributedDataParallelKwargs(
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=options.find_unused_parameters,
                    **bucket_arguments(options.settings),
                ),
            ],
        )
        # ACCELERATE_GRADIENT_ACCUMULATION_STEPS in the environment beats the argument above.
        if self.accelerator.gradient_accumulation_steps != 1:
            raise UnsupportedError(
                f"Accelerate was told from outside to divide by {self.accelerator.gradient_accumulation_steps} "
                "accumulation steps; unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
            )
        self.rank = self.accelerator.process_index
        self.local_rank = self.accelerator.local_process_index
        self.world_size = self.accelerator.num_processes
        self.device = self.accelerator.device
        scaler = self.accelerator.scaler
        self._fresh_scaler: dict[str, Any] = scaler.state_dict() if scaler is not None else {}
        self.model: Any = None
        self.optimizer: Any = None

    @classmethod
    @override
    def can_pretend(cls, options: BackendOptions) -> bool:
        return True

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self.model is not None:
            # The optimizer of the training before would be unscaled, too, and its last step would count as skipped.
            self.model = self.optimizer = None
            self.accelerator.free_memory()
        if self.accelerator.scaler is not None:  # Accelerate has one for all trainings
            self.accelerator.scaler.load_state_dict(self._fresh_scaler)
        # With broadcast_buffers=False the wrapper leaves buffers alone at the start, too.
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer.contiguous(), from_process=0))  # NCCL refuses other tensors
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self._parameters = list(self.model.parameters())  # to look for them in each step takes a tenth of a millisecond
        if dist.is_initialized():
            # Not by the hooks of DistributedDataParallelKwargs: DDP refuses that for bf16 on a CPU, and that for
            # PowerSGD does not finish one bucket before the next.
            compress_gradients(self.model, self.options)
            send_used_rows(self.model, self.options)
        return self.model, self.optimizer

    @override
    def autocast(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.accelerator.autocast())

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self.accelerator.no_sync(self.model))

    @override
    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        # This unscales the gradients first; an infinite threshold only measures their norm.
        grad_norm = self.accelerator.clip_grad_norm_(self._parameters, max_grad_norm or math.inf)
        grad_norm = cast(torch.Tensor, grad_norm)
        skipped = self.accelerator.scaler is None and self.must_skip(grad_norm)
        if not skipped:
            self.optimizer.step()
            skipped = self.accelerator.optimizer_step_was_skipped
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        # Accelerator.reduce has no minimum or maximum, so this uses the process group that it made.
        return all_reduce_in_group(tensor, op) if dist.is_initialized() else tensor

    @override
    def barrier(self) -> None:
        if self._shares_gpu:
            dist.barrier()
        else:
            self.accelerator.wait_for_everyone()

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, self.accelerator.unwrap_model(model))

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state)

    @override
    def effective_settings(self) -> dict[str, Any]:
        settings = {
            "transport": dist.get_backend() if dist.is_initialized() else "none",
            "distributed_type": str(self.accelerator.distributed_type.value),
            "mixed_precision": self.accelerator.mixed_precision,
        }
        if dist.is_initialized():
            settings["bucket_bytes"] = self.model.bucket_bytes_cap
            settings["gradient_as_bucket_view"] = self.model.gradient_as_bucket_view
            settings["find_unused_parameters"] = self.model.find_unused_parameters
            settings |= compression_of(self.model, self.options)
        return settings | rows_sent_by(self.model, self.options)

    @override
    def shutdown(self) -> None:
        self.model = self.optimizer = None
        self._parameters = []
        self.accelerator.free_memory()
        self.barrier()
        self.accelerator.end_training()
