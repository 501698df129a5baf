"""What the processors of this machine can compute fast."""

from __future__ import annotations

import re
from pathlib import Path

# As proc(5) names them: AVX512-BF16 and AMX on x86, and the BF16 instructions of Arm.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
SLOW_BF16 = "this processor has no instructions for it, so it is slower than fp32 here; use --precision fp32"


def has_bf16(cpuinfo: str | None = None) -> bool:
    """Returns whether the processor has instructions for bf16; True where that cannot be told.

    Args:
        cpuinfo: What /proc/cpuinfo says; by default, it is read.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return True
    lists = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return not lists or any(_BF16_FLAGS & set(flags.split()) for flags in lists)


def is_slow(precision: str, device: str) -> bool:
    """Returns whether ranks compute in bf16 on a processor that has no instructions for it.

    Args:
        precision: What they compute in: "fp32", "bf16" or "fp16".
        device: What they compute on: "cpu" or "cuda".
    """
    return precision == "bf16" and device == "cpu" and not has_bf16()
