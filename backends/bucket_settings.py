"""The options of the adapters that wrap a model in torch's DistributedDataParallel; importing them imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings, Place, UnsupportedError


class BucketSettings(BackendSettings):
    """How gradients are collected into buckets, each of which is reduced at once, and what of them is."""

    bucket_cap_mb: float | None = Field(
        None, ge=0.01, le=100_000, description="size of a bucket of gradients, in MiB (default: torch's 25)"
    )
    embedding_gradients: Literal["whole", "rows"] | None = Field(
        None, description="rows: on CPUs, send only the rows of embeddings' gradients that a step uses (default: whole)"
    )

    @override
    def check(self, *, precision: str, optimizer: str, grad_compression: str, place: Place) -> None:
        if self.embedding_gradients != "rows":
            return
        if place.device != "cpu":
            raise UnsupportedError(
                "--embedding-gradients rows is for ranks that compute on CPUs: on a GPU, each step would wait until it "
                "is known how many rows are used; choose --embedding-gradients whole"
            )
        if grad_compression != "none":
            raise UnsupportedError(
                f"--embedding-gradients rows sends gradients as they are, not as --grad-compression {grad_compression} "
                "would; leave that out, or choose --embedding-gradients whole"
            )


def bucket_arguments(settings: BackendSettings) -> dict[str, Any]:
    """Returns what DistributedDataParallel is to be told, which is nothing where its default is to hold.

    See https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    """
    if isinstance(settings, BucketSettings) and settings.bucket_cap_mb is not None:
        return {"bucket_cap_mb": settings.bucket_cap_mb}
    return {}
