"""Measures how fast a device multiplies matrices: ``python -m compare.race.matmul_peak cuda bf16``.

The rate of large square products is the most that a model can reach on this very device, whatever the data sheet says.
The command prints it in operations a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from launch.guardian import guarded

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SIZES = {"cpu": 1024, "cuda": 8192}
_REPEATS = 10


def measure(device: str, precision: str) -> float:
    """Returns the median rate of square products, in operations a second: 2 n^3 for each product."""
    import torch

    size = _SIZES[device]
    dtype = getattr(torch, _DTYPES[precision])
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(3 + _REPEATS):
        began = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return float(2 * size**3 / sorted(seconds[3:])[_REPEATS // 2])


def measure_apart(device: str, precision: str) -> float | None:
    """Measures in another process, which leaves no threads and no memory behind; returns None if that fails."""
    command = [sys.executable, "-m", "compare.race.matmul_peak", device, precision]
    with guarded() as mark:
        environment = {**os.environ, **mark, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return float(done.stdout) if done.returncode == 0 else None


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in _SIZES or sys.argv[2] not in _DTYPES:
        sys.exit(f"usage: python -m compare.race.matmul_peak {'|'.join(_SIZES)} {'|'.join(_DTYPES)}")
    print(measure(sys.argv[1], sys.argv[2]))
