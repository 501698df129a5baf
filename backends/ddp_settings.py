"""The options of DDP; importing them imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from typing_extensions import override

from backends.bucket_settings import BucketSettings
from backends.capabilities import Place, UnsupportedError


class DDPSettings(BucketSettings):
    """Options of torch's DistributedDataParallel."""

    transport: Literal["shared-memory"] | None = Field(
        None, description="shared-memory: average gradients through memory that ranks share (default: gloo, or NCCL)"
    )

    @override
    def check(self, *, precision: str, optimizer: str, grad_compression: str, place: Place) -> None:
        super().check(precision=precision, optimizer=optimizer, grad_compression=grad_compression, place=place)
        if self.transport == "shared-memory" and (place.device != "cpu" or place.num_nodes > 1):
            where = f"{place.num_nodes} nodes" if place.num_nodes > 1 else "GPUs"
            raise UnsupportedError(
                f"--transport shared-memory is for ranks that compute on the CPUs of one node, not on {where}; "
                "leave it out"
            )
        if self.transport == "shared-memory" and grad_compression != "none":
            raise UnsupportedError(
                "--transport shared-memory sends nothing that could be made smaller by "
                f"--grad-compression {grad_compression}; leave one of the two out"
            )
        if self.transport == "shared-memory" and self.embedding_gradients == "rows":
            raise UnsupportedError(
                "--transport shared-memory sends no rows that --embedding-gradients rows could leave out; choose "
                "--embedding-gradients whole"
            )
