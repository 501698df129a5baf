"""The options of FSDP2; importing them imports no torch."""

from __future__ import annotations

from pydantic import Field

from backends.capabilities import BackendSettings


class FSDP2Settings(BackendSettings):
    """Options of torch's fully_shard."""

    reshard_after_forward: bool = Field(
        True,
        description="free the gathered weights of a layer after its forward pass and gather them again for its "
        "backward pass, as ZeRO-3 does; otherwise they are kept in between, as with ZeRO-2",
    )
