"""Which adapters are held to the contract on a GPU, by one rank (NCCL, where there is a group) and by two (gloo)."""

from __future__ import annotations

from backends.registry import BACKENDS, find_backend

ADAPTERS = [
    *(name for name in BACKENDS if name != "apex"),
    "apex",
    "tests.gpu.apex_levels:ApexO1Delayed",
    "tests.gpu.apex_levels:ApexO2",
]
NUM_PROCESSES = "1,2"


def unavailable_reason(adapter: str, device: str = "cuda") -> str | None:
    """Why this adapter cannot be tried on this device here, or None."""
    row = BACKENDS["apex"] if adapter.startswith("tests.gpu.apex") else find_backend(adapter)
    reason = row.unavailable_reason()
    if reason is None and device not in row.capabilities.precisions:
        reason = f"{adapter} does not run on {device}; was it built with GPU operations?"
    return reason


def more_options(adapter: str) -> list[str]:
    """Other levels of Apex differ in fp16 only."""
    return ["--precision", "fp16"] if adapter.startswith("tests.gpu.apex") else []
