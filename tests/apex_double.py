"""A double of what the adapter calls of Apex: it writes down the calls, and proves nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CALLS: list[str] = []


class _Handle:
    def _deactivate(self) -> None:
        CALLS.append("take back the patches")


_amp_state = SimpleNamespace(handle=None, loss_scalers=[], opt_properties=SimpleNamespace(opt_level=""))


def initialize(model: torch.nn.Module, optimizer: Any, *, opt_level: str, **options: Any) -> tuple[Any, Any]:
    CALLS.append(f"initialize {opt_level}")
    _amp_state.opt_properties.opt_level = opt_level
    _amp_state.handle = _Handle() if opt_level == "O1" else None
    _amp_state.loss_scalers = [SimpleNamespace(_loss_scale=65536.0, _unskipped=0)]
    optimizer._amp_stash = SimpleNamespace(already_patched=False, all_fp16_params=[], all_fp32_from_fp16_params=[])
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def noted_step() -> None:
        CALLS.append("skip" if optimizer._amp_stash.already_patched else "step")
        if not optimizer._amp_stash.already_patched:
            step()
        optimizer._amp_stash.already_patched = False

    def noted_zero_grad() -> None:
        CALLS.append("zero_grad")
        zero_grad()

    optimizer.step, optimizer.zero_grad = noted_step, noted_zero_grad
    return model, optimizer


@contextmanager
def scale_loss(loss: torch.Tensor, optimizer: Any, *, delay_unscale: bool) -> Iterator[torch.Tensor]:
    yield loss
    CALLS.append("backward, unscale later" if delay_unscale else "backward, unscale")
    if not delay_unscale and not torch.isfinite(loss):
        optimizer._amp_stash.already_patched = True


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    CALLS.append("master_params")
    for group in optimizer.param_groups:
        yield from group["params"]


class DistributedDataParallel(torch.nn.Module):
    message_size = 10000000

    def __init__(self, module: torch.nn.Module, delay_allreduce: bool = False) -> None:
        super().__init__()
        CALLS.append("wrap")
        self.module, self.delay_allreduce = module, delay_allreduce

    def forward(self, *arguments: Any) -> Any:
        CALLS.append("forward")
        return self.module(*arguments)

    def enable_allreduce(self) -> None:
        CALLS.append("enable_allreduce")

    def disable_allreduce(self) -> None:
        CALLS.append("disable_allreduce")


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts the steps of a whole group in the group, as Apex's does."""

    def __init__(self, groups: list[dict[str, Any]], *, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(groups, {"lr": 1e-3, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), learning_rate = group["betas"], group["lr"]
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(one), torch.zeros_like(one)
                state["exp_avg"].lerp_(one.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(one.grad, one.grad, value=1 - beta2)
                one.mul_(1 - learning_rate * group["weight_decay"])
                scale = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
                one.addcdiv_(state["exp_avg"], scale, value=-learning_rate / (1 - beta1**step))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the double where `import apex` finds it, for one test."""
    amp = ModuleType("apex.amp")
    amp.__dict__.update(
        initialize=initialize,
        scale_loss=scale_loss,
        master_params=master_params,
        state_dict=lambda: {"loss_scaler0": {"loss_scale": _amp_state.loss_scalers[0]._loss_scale, "unskipped": 0}},
        load_state_dict=lambda state: CALLS.append(f"load scale {state['loss_scaler0']['loss_scale']:g}"),
    )
    modules = {
        "apex": {"amp": amp},
        "apex.amp": amp.__dict__,
        "apex.amp._amp_state": {"_amp_state": _amp_state},
        "apex.multi_tensor_apply": {"multi_tensor_applier": SimpleNamespace(available=False)},
        "apex.optimizers": {"FusedAdam": FusedAdam},
        "apex.parallel": {"DistributedDataParallel": DistributedDataParallel},
    }
    for name, content in modules.items():
        module = amp if name == "apex.amp" else ModuleType(name)
        module.__dict__.update({key: value for key, value in content.items() if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "backends.apex", raising=False)
    CALLS.clear()
