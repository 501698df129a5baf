"""Native PyTorch: torch.nn.parallel.DistributedDataParallel.

Idioms from https://docs.pytorch.org/docs/stable/notes/ddp.html. Started by torchrun or by
torch.multiprocessing, which both describe the world in RANK, LOCAL_RANK and WORLD_SIZE.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from backends.bucket_settings import bucket_arguments
from backends.compression import compress_gradients, compression_of
from backends.ddp_settings import DDPSettings
from backends.embedding_rows import rows_sent_by, send_used_rows
from backends.interface import BackendOptions
from backends.registry import BACKENDS
from backends.shared_memory import SharedGradients
from backends.torch_amp import TorchAmpBackend
from backends.torch_group import TorchGroupBackend, broadcast_from_first
from backends.traffic import Count

# Parameters and buffers are made equal once. By default DDP broadcasts buffers again in every forward, which costs
# traffic, and deadlocks if one rank runs a forward pass alone. torch 2.13 renamed the option.
_OPTION = "forward_sync_buffers"
if _OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _OPTION = "broadcast_buffers"
_LEAVE_BUFFERS: dict[str, Any] = {_OPTION: False}


class DDPBackend(TorchGroupBackend, TorchAmpBackend):
    name = "ddp"
    capabilities = BACKENDS["ddp"].capabilities
    Settings = DDPSettings
    _shared_gradients: SharedGradients | None = None

    @classmethod
    @override
    def can_pretend(cls, options: BackendOptions) -> bool:
        return not _asks_for_shared_memory(options)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        broadcast_from_first(model.buffers())  # before torch 2.13, the option also stops the broadcast at the start
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.options.find_unused_parameters,
            **_LEAVE_BUFFERS,
            **bucket_arguments(self.options.settings),
        )
        if self._shares_memory:
            gradients = SharedGradients(
                most_buckets=len(list(model.parameters())), timeout_seconds=self.options.timeout_seconds
            )
            # A lambda, since torch compares annotations with classes, and ours are strings.
            wrapped.register_comm_hook(None, lambda _, bucket: gradients.average(bucket))
            self._shared_gradients = gradients
        compress_gradients(wrapped, self.options)
        send_used_rows(wrapped, self.options)
        self.prepare_amp(wrapped, optimizer)
        return wrapped, optimizer

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        # DDP decides in the forward whether the backward will reduce, so it must run inside too.
        return cast(DistributedDataParallel, self.model).no_sync()

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    @override
    def effective_settings(self) -> dict[str, Any]:
        wrapped = cast(DistributedDataParallel, self.model)
        return {
            "transport": "shared memory" if self._shares_memory else dist.get_backend(),
            "bucket_bytes": wrapped.bucket_bytes_cap,
            "gradient_as_bucket_view": wrapped.gradient_as_bucket_view,
            "find_unused_parameters": wrapped.find_unused_parameters,
            **compression_of(wrapped, self.options),
            **rows_sent_by(wrapped, self.options),
        }

    @override
    @contextmanager
    def count_traffic(self, count: Count) -> Iterator[None]:
        with super().count_traffic(count):
            if self._shared_gradients is not None:
                self._shared_gradients.count = count
            try:
                yield
            finally:
                if self._shared_gradients is not None:
                    self._shared_gradients.count = None

    @override
    def shutdown(self) -> None:
        self.release()
        self.leave_group()
        if self._shared_gradients is not None:
            self._shared_gradients.close()

    @property
    def _shares_memory(self) -> bool:
        return _asks_for_shared_memory(self.options) and self.world_size > 1


def _asks_for_shared_memory(options: BackendOptions) -> bool:
    return isinstance(options.settings, DDPSettings) and options.settings.transport == "shared-memory"
