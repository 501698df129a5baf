"""The options of the adapters that wrap a model in torch's DistributedDataParallel; importing them imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from backends.capabilities import BackendSettings


class BucketSettings(BackendSettings):
    """How gradients are collected into buckets, each of which is reduced at once."""

    bucket_cap_mb: float | None = Field(
        None, ge=0.01, le=100_000, description="size of a bucket of gradients, in MiB (default: torch's 25)"
    )


def bucket_arguments(settings: BackendSettings) -> dict[str, Any]:
    """Returns what DistributedDataParallel is to be told, which is nothing where its default is to hold.

    See https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    """
    if isinstance(settings, BucketSettings) and settings.bucket_cap_mb is not None:
        return {"bucket_cap_mb": settings.bucket_cap_mb}
    return {}
