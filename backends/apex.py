"""NVIDIA Apex up to tag 25.04: apex.parallel.DistributedDataParallel and apex.amp.

Both were removed upstream right after that tag. The idiom for accumulation is the one Apex never
documented: amp unscales at the end of every `scale_loss` and stashes earlier micro-gradients
apart, so every micro-batch but the last must delay the unscaling, and the all-reduce must be
switched before a forward, never after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from apex import amp
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel

from backends.interface import StepResult
from backends.registry import BACKENDS
from backends.torch_amp import clip_gradients
from backends.torch_group import TorchGroupBackend

_OPT_LEVELS = {"fp32": "O0", "fp16": "O1"}


class ApexBackend(TorchGroupBackend):
    name = "apex"
    capabilities = BACKENDS["apex"].capabilities

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        opt_level = _OPT_LEVELS[self.options.precision]
        model, self.optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        if opt_level == "O1":
            # O1 caches weight casts and fails on a weight that is used twice in a forward.
            amp._amp_state.handle._enable_caching = False
            amp.load_state_dict({"loss_scaler0": {"loss_scale": self.options.init_loss_scale, "unskipped": 0}})
        # Wrapping broadcasts the parameters and never the buffers.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        self.model = DistributedDataParallel(model, delay_allreduce=True)
        self.optimizer.zero_grad()
        self._delay_unscale = False
        return self.model, self.optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # amp.initialize patched the functions or cast the model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.disable_allreduce()
        self._delay_unscale = True
        try:
            yield
        finally:
            self._delay_unscale = False
            self.model.enable_allreduce()

    def backward(self, loss: torch.Tensor) -> None:
        with amp.scale_loss(loss, self.optimizer, delay_unscale=self._delay_unscale) as scaled_loss:
            scaled_loss.backward()

    def step(self, max_grad_norm: float) -> StepResult:
        # On overflow amp replaced step() by one that skips once and puts the real one back.
        skipped = bool(self.optimizer._amp_stash.already_patched)
        if skipped:
            grad_norm = torch.tensor(math.inf, device=self.device)
        else:
            grad_norm = clip_gradients(amp.master_params(self.optimizer), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()  # takes no argument under O2
        return StepResult(grad_norm, skipped)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    def state_dict(self) -> dict[str, Any]:
        return dict(amp.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        amp.load_state_dict(state)

    def effective_settings(self) -> dict[str, Any]:
        return {
            "transport": dist.get_backend(),
            "opt_level": amp._amp_state.opt_properties.opt_level,
            "message_size_elements": self.model.message_size,
            "delay_allreduce": self.model.delay_allreduce,
            "fused_kernels": bool(multi_tensor_applier.available),
        }

    def shutdown(self) -> None:
        self.model = self.optimizer = None
        self.leave_group()
