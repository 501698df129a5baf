"""NVIDIA Apex up to tag 25.04: apex.parallel.DistributedDataParallel and apex.amp.

Both were removed upstream right after that tag. The idiom for accumulation is the one Apex never
documented: amp unscales at the end of every `scale_loss` and stashes earlier micro-gradients
apart, so every micro-batch but the last must delay the unscaling, and the all-reduce must be
switched before a forward, never after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from apex import amp
from apex.amp._amp_state import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel
from typing_extensions import override

from backends.apex_settings import NO_KERNELS, ApexSettings
from backends.capabilities import UnsupportedError
from backends.interface import BackendOptions, StepResult
from backends.memory_layout import make_contiguous
from backends.registry import BACKENDS
from backends.torch_amp import clip_gradients
from backends.torch_group import TorchGroupBackend, broadcast_from_first

# amp's loss scaler has the same constants as torch's, but no names for them.
_SCALER = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class ApexBackend(TorchGroupBackend):
    name = "apex"
    capabilities = BACKENDS["apex"].capabilities
    signs = BACKENDS["apex"].signs
    Settings = ApexSettings

    def __init__(self, options: BackendOptions) -> None:
        self.settings = cast(ApexSettings, options.settings)
        self.opt_level = self.settings.opt_level or ("O1" if options.precision == "fp16" else "O0")
        if self.settings.fused_adam and not multi_tensor_applier.available:
            raise UnsupportedError(NO_KERNELS)
        super().__init__(options)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        # Apex's own check for a model that is wrapped already never matches.
        if isinstance(model, (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)):
            raise ValueError("the model is wrapped already; amp.initialize must come before the wrapper")
        _require_kernels_for(model)
        make_contiguous(model, optimizer)  # Apex's kernels refuse other tensors
        _unpatch_torch()
        # Apex broadcasts the parameters when it wraps, and never the buffers. Under O2 the
        # parameters have by then lost half of their digits, which the master weights should keep.
        broadcast_from_first([*model.parameters(), *model.buffers()])
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if self.settings.fused_adam:
            optimizer = _fused_adam(optimizer)
        model, self.optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=self.opt_level,
            # O0 would cast a float64 model and turn outputs into plain dictionaries.
            cast_model_type=False if self.opt_level == "O0" else None,
            max_loss_scale=max(2.0**24, self.options.init_loss_scale),
            verbosity=0,
        )
        if self.opt_level != "O0":
            _amp_state.loss_scalers[0]._loss_scale = self.options.init_loss_scale
        if self.opt_level == "O1":
            # O1 caches weight casts and fails on a weight that is used twice in a forward.
            _amp_state.handle._enable_caching = False
        self.model = DistributedDataParallel(model, delay_allreduce=self.settings.delay_allreduce)
        self.optimizer.zero_grad()  # makes the master weights; under O2 it takes no argument
        self._set_masters(weights)
        self._delay_unscale = False
        return self.model, self.optimizer

    @override
    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # amp.initialize patched the functions or cast the model

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.disable_allreduce()
        self._delay_unscale = True
        try:
            yield
        finally:
            self._delay_unscale = False
            self.model.enable_allreduce()

    @override
    def backward(self, loss: torch.Tensor) -> None:
        with amp.scale_loss(loss, self.optimizer, delay_unscale=self._delay_unscale) as scaled_loss:
            try:
                scaled_loss.backward()
            except RuntimeError as error:
                if "buckets were not allreduced" in str(error):  # Apex noticed that a gradient is missing, not which
                    self._name_missing_gradients(error)
                raise

    def _name_missing_gradients(self, error: RuntimeError) -> None:
        parameters = self.unwrap(self.model).named_parameters()
        missing = [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]
        if missing:
            raise ValueError(f"no gradient reached {', '.join(missing)}; freeze such parameters under Apex") from error

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        # On overflow amp replaced step() by one that skips once and puts the real one back.
        overflowed = bool(self.optimizer._amp_stash.already_patched)
        if overflowed:
            grad_norm = torch.tensor(math.inf, device=self.device)
        else:
            grad_norm = clip_gradients(amp.master_params(self.optimizer), max_grad_norm)
        skipped = overflowed or self.must_skip(grad_norm)
        if overflowed or not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    @override
    def weights(self, model: torch.nn.Module) -> dict[str, Any]:
        masters = self._masters()
        weights = super().weights(model)
        for name, parameter in self.unwrap(model).named_parameters(remove_duplicate=False):
            weights[name] = masters.get(parameter, parameter).detach()
        return weights

    @override
    def load_weights(self, model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
        super().load_weights(model, weights)
        self._set_masters(weights)

    def _masters(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """The float32 master weight of each parameter that amp cast to half precision; none but under O2."""
        stash = self.optimizer._amp_stash
        if self.opt_level != "O2":
            return {}
        return dict(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))

    def _set_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        masters = self._masters()
        for name, parameter in self.unwrap(self.model).named_parameters():
            if parameter in masters:
                masters[parameter].detach().copy_(weights[name])

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.opt_level == "O0":
            return {}
        scaler = amp.state_dict()["loss_scaler0"]
        return {"scale": scaler["loss_scale"], **_SCALER, "_growth_tracker": scaler["unskipped"]}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.opt_level != "O0":
            scaler = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
            amp.load_state_dict({"loss_scaler0": scaler})

    @override
    def effective_settings(self) -> dict[str, Any]:
        return {
            "transport": dist.get_backend(),
            "opt_level": _amp_state.opt_properties.opt_level,
            "message_size_elements": self.model.message_size,
            "delay_allreduce": self.model.delay_allreduce,
            "optimizer": type(self.optimizer).__name__,
            # Without them Apex computes the same in Python, slowly.
            "fused_kernels": bool(multi_tensor_applier.available),
        }

    @override
    def shutdown(self) -> None:
        self.model = self.optimizer = None
        _unpatch_torch()
        self.leave_group()


def _unpatch_torch() -> None:
    """Restores the functions of torch that O1 replaced, for later trainings in this process."""
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()


def _require_kernels_for(model: torch.nn.Module) -> None:
    """Refuses what Apex's kernels do not know: its error would come in the middle of a backward pass.

    Raises:
        UnsupportedError: It names the parameter.
    """
    if not multi_tensor_applier.available:  # the same in Python knows any dtype
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float64:
            raise UnsupportedError(
                f"apex cannot train {name}, which is float64: its kernels copy no such gradients; make it float32 (the "
                "tasks of this project: --dtype float32), or use ddp"
            )


def _fused_adam(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Replaces torch's AdamW by Apex's FusedAdam, which begins without state and saves it as torch's does."""
    from apex.optimizers import FusedAdam

    groups = [
        {name: group[name] for name in ("params", "lr", "betas", "eps", "weight_decay")}
        for group in optimizer.param_groups
    ]
    fused = cast(torch.optim.Optimizer, FusedAdam(groups, adam_w_mode=True))
    fused.register_state_dict_post_hook(steps_in_state)
    fused.register_load_state_dict_pre_hook(steps_in_groups)
    return fused


def steps_in_state(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Turns a state_dict of FusedAdam, which counts the steps of a whole group, into one of torch's AdamW.

    Returns:
        The same with the number of steps in the state of each parameter, as torch has it.
    """
    steps = {number: group["step"] for group in saved["param_groups"] if "step" in group for number in group["params"]}
    state = {
        number: {"step": torch.tensor(float(steps[number]), dtype=torch.float32), **values}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": [_without_step(group) for group in saved["param_groups"]]}


def steps_in_groups(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `steps_in_state`.

    Raises:
        ValueError: The parameters of a group have taken different numbers of steps, or their number is missing.
    """
    groups = []
    for group in saved["param_groups"]:
        states = [saved["state"][number] for number in group["params"] if number in saved["state"]]
        if not all("step" in values for values in states):
            raise ValueError("its optimizer state lacks the number of steps, which FusedAdam needs to go on")
        steps = {int(values["step"]) for values in states}
        if len(steps) > 1:
            raise ValueError("its parameters have taken different numbers of steps, which FusedAdam cannot have")
        groups.append(_without_step(group) | ({"step": steps.pop()} if steps else {}))
    state = {number: _without_step(values) for number, values in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def _without_step(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "step"}
