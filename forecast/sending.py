"""How a backend sends the gradients of a step: in buckets, through a fusion buffer, or all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from compare.strict import Strict
from forecast.algorithms import AllReduce

Way = Literal["buckets", "fusion", "whole"]

# torch's defaults (torch.nn.parallel.DistributedDataParallel): a first bucket of 1 MiB, then 25 MiB.
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20
# Horovod's defaults (https://horovod.readthedocs.io/en/stable/tensor-fusion_include.html).
_FUSION_BUFFER = 128 * 2**20
_CYCLE_SECONDS = 1e-3
_BYTES_OF_FLOAT32 = 4


class Gradient(NamedTuple):
    """A gradient, in the order of time.

    Attributes:
        ready: Seconds from the beginning of the last backward pass of the step until it is computed.
        num_bytes: Its size, as it is sent.
    """

    ready: float
    num_bytes: float


class Buckets(Strict):
    """DDP: gradients fill buckets in the order in which they become ready; a full one is reduced in the background.

    A bucket is full once it has at least so many bytes, and buckets are reduced one after the other (Li et al. 2020,
    VLDB, https://doi.org/10.14778/3415478.3415530, section 3.2.3, and torch's `compute_bucket_assignment_by_size`).
    """

    overlaps: ClassVar[bool] = True
    way: Literal["buckets"] = "buckets"
    first_bytes: int = Field(default=_FIRST_BUCKET, gt=0)
    bucket_bytes: int = Field(default=_BUCKET, gt=0)

    def finish(self, gradients: Sequence[Gradient], backward: float, all_reduce: AllReduce) -> float:
        """Returns the seconds from the beginning of the backward pass until the last gradient is reduced.

        Args:
            gradients: All gradients, in the order of time.
            backward: Seconds that the backward pass takes, with what follows the last gradient.
            all_reduce: What an all-reduce takes.
        """
        finished, filled, limit = 0.0, 0.0, self.first_bytes
        for number, gradient in enumerate(gradients, start=1):
            filled += gradient.num_bytes
            if filled >= limit or number == len(gradients):
                finished = max(gradient.ready, finished) + all_reduce(filled)
                filled, limit = 0.0, self.bucket_bytes
        return finished


class Fusion(Strict):
    """Horovod: a thread wakes up in cycles and reduces what has become ready, through a buffer of limited size.

    At each cycle in which something is ready, ranks first agree on what all of them have, which is counted as an
    all-reduce of no bytes (Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799, section 4).
    """

    overlaps: ClassVar[bool] = True
    way: Literal["fusion"] = "fusion"
    buffer_bytes: int = Field(default=_FUSION_BUFFER, gt=0)
    cycle_seconds: float = Field(default=_CYCLE_SECONDS, ge=0)

    def finish(self, gradients: Sequence[Gradient], backward: float, all_reduce: AllReduce) -> float:
        """See `Buckets.finish`."""
        now, free, waiting = 0.0, 0.0, list(gradients)
        while waiting:
            # A cycle begins so long after the one before began, or when that has ended (RunLoopOnce of Horovod's
            # operations.cc); one that finds nothing ready takes no time.
            now = max(now + self.cycle_seconds, free, waiting[0].ready)
            num_ready = sum(gradient.ready <= now for gradient in waiting)
            free = now + all_reduce(0.0) + sum(map(all_reduce, self._buffers(waiting[:num_ready])))
            del waiting[:num_ready]
        return free

    def _buffers(self, gradients: Sequence[Gradient]) -> list[float]:
        """Returns the bytes of each buffer; a gradient that is larger than a buffer is sent alone."""
        buffers = [0.0]
        for gradient in gradients:
            if buffers[-1] and buffers[-1] + gradient.num_bytes > self.buffer_bytes:
                buffers.append(0.0)
            buffers[-1] += gradient.num_bytes
        return buffers


class Whole(Strict):
    """One all-reduce of all gradients after the backward pass, which hides nothing."""

    overlaps: ClassVar[bool] = False
    way: Literal["whole"] = "whole"

    def finish(self, gradients: Sequence[Gradient], backward: float, all_reduce: AllReduce) -> float:
        """See `Buckets.finish`."""
        return backward + all_reduce(sum(gradient.num_bytes for gradient in gradients))


Sending = Annotated[Buckets | Fusion | Whole, Field(discriminator="way")]

WAYS: Mapping[Way, Buckets | Fusion | Whole] = {"buckets": Buckets(), "fusion": Fusion(), "whole": Whole()}
"""Each way, with the defaults of its library."""


def sending_of(effective: Mapping[str, Any], asked: Mapping[str, Any]) -> Buckets | Fusion | Whole:
    """Returns how a backend sends, from the settings that were read back from its library.

    Args:
        effective: What the adapter read back, as the record of a run has it.
        asked: The backend's own options. Where a size of buckets is asked for, the first bucket has it, too.
    """
    if "bucket_bytes" in effective:
        size = int(effective["bucket_bytes"])
        return Buckets(first_bytes=_FIRST_BUCKET if asked.get("bucket_cap_mb") is None else size, bucket_bytes=size)
    if "fusion_threshold_bytes" in effective:
        cycle = 1e-3 * float(effective["cycle_time_ms"])
        return Fusion(buffer_bytes=int(effective["fusion_threshold_bytes"]), cycle_seconds=cycle)
    if "message_size_elements" in effective and not effective.get("delay_allreduce"):
        size = _BYTES_OF_FLOAT32 * int(effective["message_size_elements"])
        return Buckets(first_bytes=size, bucket_bytes=size)
    return Whole()
