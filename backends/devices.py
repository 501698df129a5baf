"""Which accelerators this machine has."""

from __future__ import annotations

from pathlib import Path

# The control device of NVIDIA's driver, and its counterpart under WSL.
_DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def count_gpus() -> int:
    """Counts the CUDA devices that torch can use; without a driver, it does not import torch."""
    if not any(device.exists() for device in _DRIVER_DEVICES):
        return 0
    import torch

    return torch.cuda.device_count()
