"""Apex's own Python code on a CPU: stand-ins for the little of CUDA that it asks for, and our adapter on top.

Hooks, buckets, the all-reduce over gloo, loss scaling, skipped steps, casts and master weights are
then Apex's, unchanged. Streams, kernels and NCCL are not there. To be imported by the ranks of a
group alone: what is replaced stays so for the whole process.

PYTHONPATH=.:APEX_SOURCE launch/run.sh contract tests.apex_on_cpu:ApexO1OnCpu
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from backends.capabilities import Capabilities
from tests.apex_levels import ChosenSettings


class _Stream:
    """Runs nothing beside anything: on a CPU all work is done in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> None: ...


def _replace_cuda() -> None:
    """Puts the stand-ins in place and imports Apex under them."""
    plain_type, is_cuda = torch.Tensor.type, torch.Tensor.is_cuda

    def type_on_cuda(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = plain_type(tensor, *arguments, **options)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    def is_cuda_for_amp(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.startswith("apex.amp") or bool(is_cuda.__get__(tensor))

    torch.Tensor.type = type_on_cuda  # type: ignore[assignment, method-assign]
    torch.Tensor.is_cuda = property(is_cuda_for_amp)  # type: ignore[assignment, misc]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment, method-assign]
    torch.cuda.IntTensor = torch.IntTensor  # type: ignore[misc, assignment]
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda stream: stream  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    version, torch.version.cuda = torch.version.cuda, "12.8"
    try:
        import apex.parallel  # noqa: F401 (now, while torch claims a CUDA)
        from apex.amp._amp_state import _amp_state
    finally:
        torch.version.cuda = version
    _amp_state.allow_incoming_model_not_fp32 = True


_replace_cuda()

from backends.apex import ApexBackend  # noqa: E402 (needs the stand-ins)


class ApexO1OnCpu(ChosenSettings, ApexBackend):
    """O0 for fp32 and O1 for fp16, with overlapped reduction."""

    name = "apex on CPU"
    capabilities = Capabilities(
        {"cpu": ("fp32", "fp16")},
        start_methods=("torchrun",),
        unused_parameters=False,
        reasons={"bf16": "its reduction leaves bfloat16 gradients out without a word"},
    )


class ApexO1DelayedOnCpu(ApexO1OnCpu):
    """The same with all reductions at the end of the backward pass."""

    chosen: ClassVar[dict[str, Any]] = {"delay_allreduce": True}


class ApexO2OnCpu(ApexO1OnCpu):
    """O2 for fp16: a model in half precision, and master weights."""

    chosen: ClassVar[dict[str, Any]] = {"opt_level": "O2"}
