"""The options of Apex, in a file of their own that can be imported where Apex is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings, Place, UnsupportedError

NO_KERNELS = (
    "--fused-adam: this Apex was built without its kernels; build it with --cpp_ext --cuda_ext, or leave the option out"
)
_PRECISIONS = {"O0": "fp32", "O1": "fp16", "O2": "fp16"}


class ApexSettings(BackendSettings):
    """Options of NVIDIA Apex."""

    opt_level: Literal["O0", "O1", "O2"] | None = Field(
        None, description="of amp: O0 is fp32, O1 casts functions to fp16, O2 the model (default: as --precision says)"
    )
    delay_allreduce: bool = Field(False, description="reduce all gradients at the end of the backward pass")
    fused_adam: bool = Field(False, description="Apex's FusedAdam instead of torch's AdamW; needs Apex's kernels")

    @override
    @property
    def implied_precision(self) -> str | None:
        return None if self.opt_level is None else _PRECISIONS[self.opt_level]

    @override
    def check(self, *, precision: str, optimizer: str, grad_compression: str, place: Place) -> None:
        if self.implied_precision not in (None, precision):
            raise UnsupportedError(
                f"--opt-level {self.opt_level} computes in {self.implied_precision}, not in {precision}; "
                f"leave --precision {precision} out or choose another level"
            )
        if self.fused_adam and optimizer != "adamw":
            raise UnsupportedError(
                f"--fused-adam replaces AdamW and does not work with --optimizer {optimizer}; leave one of the two out"
            )

    @override
    def check_machine(self, *, start_method: str) -> None:
        if self.fused_adam and find_spec("amp_C") is None:
            raise UnsupportedError(NO_KERNELS)
