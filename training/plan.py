"""Which samples make which global batch, and which rank computes which of them when.

The global batches of an epoch follow from (seed, epoch) alone. World size and accumulation only
cut them: whatever they are, the same samples enter the same optimizer step, each exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SampleIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes between two backward passes.

    Attributes:
        sample_ids: The samples, at least one.
        weight: 1.0; or 0.0 where no sample is left for this rank: it computes one that belongs to
            another rank and contributes nothing, so as to take part in every collective.
    """

    sample_ids: SampleIds
    weight: float


class Plan:
    """Cuts `num_samples` samples into global batches, and global batches into micro-batches."""

    def __init__(
        self, *, num_samples: int, global_batch_size: int, micro_batch_size: int, world_size: int, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.world_size = world_size
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, epoch: int) -> list[SampleIds]:
        """Returns the global batches of an epoch: every sample once; the last batch may be short."""
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_samples)
        return [order[start : start + self.global_batch_size] for start in range(0, len(order), self.global_batch_size)]

    def micro_batches(self, global_batch: SampleIds, rank: int) -> list[MicroBatch]:
        """Returns the share of one rank, in the order in which it computes them; equally many for all ranks.

        A short batch needs fewer micro-steps and is spread as evenly as possible over all ranks
        and micro-steps. A micro-batch is empty only if there are fewer samples than micro-batches.
        """
        num_micro_steps = -(-len(global_batch) // (self.micro_batch_size * self.world_size))
        pieces = np.array_split(global_batch, num_micro_steps * self.world_size)
        mine = pieces[rank :: self.world_size]
        return [MicroBatch(piece, 1.0) if len(piece) else MicroBatch(global_batch[:1], 0.0) for piece in mine]


def evaluation_batches(num_samples: int, *, batch_size: int, rank: int, world_size: int) -> Sequence[range]:
    """Returns this rank's share of an evaluation, without padding or repetition.

    Whole batches go to ranks, so that what is computed together, and thus every rounding, does not
    depend on the world size. A rank may get none.
    """
    batches = [range(start, min(start + batch_size, num_samples)) for start in range(0, num_samples, batch_size)]
    return batches[rank::world_size]
