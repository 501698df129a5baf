"""What the launcher passes to an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.capabilities import BackendSettings


@dataclass(frozen=True)
class BackendOptions:
    """The options of a run that concern its backend, whichever it is.

    Attributes:
        precision: "fp32" computes in the dtype of the parameters; "bf16" and "fp16" use autocast.
        device: The device type, "cpu" or "cuda".
        timeout_seconds: The time after which a collective that some rank never enters fails, in seconds.
        init_loss_scale: The first loss scale under fp16.
        find_unused_parameters: Whether some parameters may get no gradient in a step.
        skip_nonfinite: Whether a step whose averaged gradient is not finite is skipped; under fp16 it always is.
        is_traced: Whether `timeline` will be called.
        grad_compression: In what gradients travel: "none" is their own dtype; others are among `COMPRESSIONS`.
        seed: Seeds what a backend itself draws, the same on all ranks.
        settings: The options of this backend alone.
    """

    precision: str = "fp32"
    device: str = "cpu"
    timeout_seconds: float = 300.0
    init_loss_scale: float = 65536.0
    find_unused_parameters: bool = False
    skip_nonfinite: bool = False
    is_traced: bool = False
    grad_compression: str = "none"
    seed: int = 0
    settings: BackendSettings = field(default_factory=BackendSettings)
