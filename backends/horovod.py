"""Horovod: ring all-reduce behind a wrapped optimizer (https://horovod.readthedocs.io/en/stable/pytorch.html).

Horovod reduces from hooks on the gradients, in the background. Everything that reads a reduced
gradient must therefore come after `synchronize()`, and the optimizer must then be told not to
synchronise again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from typing_extensions import override

from backends.capabilities import UnsupportedError
from backends.collectives import Prepare, Prepared
from backends.horovod_settings import HorovodSettings, cycle_time, fusion_threshold
from backends.horovod_waiting import set_waiting, waiting
from backends.interface import BackendOptions, StepResult
from backends.memory_layout import make_contiguous
from backends.registry import BACKENDS
from backends.torch_amp import TorchAmpBackend, clip_gradients
from backends.traffic import counted

_SECONDS_BETWEEN_LOOKS = 1.0

_REDUCE_OPS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}

# All of Horovod's Python functions for tensors call these.
_OPERATIONS = {
    "_allreduce_async": "allreduce",
    "_grouped_allreduce_async": "allreduce",
    "_broadcast_async": "broadcast",
    "_allgather_async": "allgather",
    "horovod_torch_barrier": "barrier",
}


class HorovodBackend(TorchAmpBackend):
    name = "horovod"
    capabilities = BACKENDS["horovod"].capabilities
    signs = BACKENDS["horovod"].signs
    Settings = HorovodSettings

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._fusion_threshold, self._cycle_time = fusion_threshold(), cycle_time()
        if options.is_traced:
            # Without it, start_timeline is refused. From now on a thread of rank 0 spins, waiting for events.
            os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        hvd.init()
        settings = options.settings
        set_waiting(sleeps=isinstance(settings, HorovodSettings) and settings.wait == "sleep")
        self.rank, self.local_rank, self.world_size = hvd.rank(), hvd.local_rank(), hvd.size()
        self.device = torch.device(options.device)
        if options.device == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        self._deadline = _Deadline(options.timeout_seconds)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.bfloat16:
                raise UnsupportedError(
                    f"parameter {name} is bfloat16, which Horovod cannot reduce; keep parameters in float32 "
                    "and use --precision bf16 for autocast"
                )
        make_contiguous(model, optimizer)  # Horovod refuses other tensors, from inside the backward pass
        # Not state_dict(): it leaves out the non-persistent buffers. Not broadcast_optimizer_state():
        # on a fresh optimizer it takes a real step with zero gradients, which decays every weight.
        buffers = dict(model.named_buffers())
        carried = {name: _carried(buffer) for name, buffer in buffers.items()}
        with self._deadline:
            hvd.broadcast_parameters([*model.named_parameters(), *carried.items()], root_rank=0)
        for name, buffer in buffers.items():
            if not buffer.is_contiguous():  # a copy was sent
                buffer.copy_(carried[name].view(buffer.dtype))
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            op=hvd.Average,
            compression=getattr(hvd.Compression, self.options.grad_compression),
        )
        # It is a new optimizer, made from the parameter groups alone.
        wrapped.defaults = optimizer.defaults
        wrapped.state.update(optimizer.state)
        self.prepare_amp(model, wrapped)
        return model, wrapped

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # Two backward passes from here: this one, which stays local, and at least one more.
        self.optimizer.set_backward_passes_per_step(2)
        yield

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        unused = self._parameters_unused_everywhere() if self.options.find_unused_parameters else []
        with self._deadline:
            self.optimizer.synchronize()
        if self.optimizer.backward_passes_per_step != 1:  # it looks through all parameters
            self.optimizer.set_backward_passes_per_step(1)
        for parameter in unused:
            parameter.grad = None
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.parameters, max_grad_norm)
        with self.optimizer.skip_synchronize():
            skipped = self.update(grad_norm)
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    def _compression_in_force(self) -> dict[str, str]:
        if self.options.grad_compression == "none":
            return {}
        return {"grad_compression": "fp16" if self.optimizer._compression is hvd.Compression.fp16 else "none"}

    def _parameters_unused_everywhere(self) -> list[torch.nn.Parameter]:
        """Finds the parameters that have no gradient on any rank.

        Horovod reduces zeros for them, and weight decay and momentum would act on the zeros.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        return [parameter for parameter, count in zip(parameters, self.all_reduce(used), strict=True) if count == 0]

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        # With an explicit name: Horovod's own names count all reductions so far, including those of gradients, so
        # ranks that use different parameters would wait for each other forever. A name that comes again is not
        # negotiated again.
        name = f"lockstep.{op}.{tensor.dtype}.{tuple(tensor.shape)}"
        with self._deadline:
            return cast(torch.Tensor, hvd.allreduce(tensor.contiguous(), name=name, op=_REDUCE_OPS[op]))

    @override
    def barrier(self) -> None:
        with self._deadline:
            hvd.barrier()

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    @override
    def collectives(self) -> Mapping[str, Prepare]:
        # Horovod has no gather. Each call of a size has the same name, as a parameter has in training: Horovod does
        # not negotiate a name again.
        def name(operation: str, values: torch.Tensor) -> str:
            return f"lockstep.{operation}.{len(values)}"

        return {
            "all_reduce": lambda v: Prepared(partial(hvd.allreduce_, v, name=name("all_reduce", v), op=hvd.Sum)),
            "all_gather": lambda v: Prepared(partial(hvd.allgather, v, name=name("all_gather", v))),
            "broadcast": lambda v: Prepared(partial(hvd.broadcast_, v, root_rank=0, name=name("broadcast", v))),
        }

    @override
    @contextmanager
    def count_traffic(self, count: Callable[[str, int, int], None]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super().count_traffic(count))
            for name, operation in _OPERATIONS.items():
                module = mpi_ops if name.startswith("_") else mpi_ops.mpi_lib
                stack.enter_context(mock.patch.object(module, name, counted(getattr(module, name), operation, count)))
            yield

    @override
    @contextmanager
    def timeline(self, path: Path) -> Iterator[None]:
        # Rank 0 writes it, of all ranks (https://horovod.readthedocs.io/en/stable/timeline.html). Both calls return
        # when its writer has opened or closed the file. No rank may send before.
        hvd.start_timeline(str(path))
        self.barrier()
        yield
        hvd.stop_timeline()

    @override
    def effective_settings(self) -> dict[str, Any]:
        return {
            "transport": "nccl" if self.device.type == "cuda" else "mpi" if hvd.mpi_enabled() else "gloo",
            "fusion_threshold_bytes": self._fusion_threshold,
            "cycle_time_ms": self._cycle_time,
            "wait": waiting(),
            "find_unused_parameters": self.options.find_unused_parameters,
            **self._compression_in_force(),
        }

    @override
    def shutdown(self) -> None:
        self.release()
        self.barrier()
        self._deadline.close()
        hvd.shutdown()


class _Deadline:
    """Turns a collective that some rank never enters into an error after a timeout.

    Horovod waits forever: its stall inspector does nothing with the Gloo controller, whose background threads keep
    answering for a stuck rank. Shutting Horovod down from another thread makes the waiting call fail. There is one such
    thread, which looks from time to time: to start one in every step takes longer than the rest of the adapter.

    Args:
        seconds: The timeout.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expires = math.inf
        self._has_expired = False
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def __enter__(self) -> None:
        self._expires = time.monotonic() + self._seconds

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._expires = math.inf
        # A ValueError tells of a handle that is unknown once Horovod is shut down.
        if self._has_expired and isinstance(error, (HorovodInternalError, ValueError)):
            raise TimeoutError(f"Timed out waiting {self._seconds:g} s for other ranks") from error

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(_SECONDS_BETWEEN_LOOKS, self._seconds / 10)):
            if time.monotonic() > self._expires:
                self._has_expired = True
                hvd.shutdown()
                return


def _carried(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the buffer, contiguous, in a dtype that Horovod supports, which bool is not: a view of it if possible."""
    buffer = buffer.contiguous()
    return buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
