"""The plan: which samples make which global batch, and which rank computes them in which micro-batch.

The global batches of an epoch follow from (seed, epoch) alone. World size and gradient accumulation only cut them:
whatever they are, the same samples enter the same optimizer step, each exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from records.config import RunConfig

SampleIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward and backward pass.

    Attributes:
        sample_ids: The numbers of the samples, at least one.
        weight: The factor of their loss. It is 1.0, or 0.0 where no sample is left for this rank: the rank then
            computes a sample of another rank and contributes nothing, so that it takes part in every collective.
    """

    sample_ids: SampleIds
    weight: float


class Plan:
    """Cuts the samples into global batches, and global batches into micro-batches.

    Args:
        num_samples: The number of training samples.
        global_batch_size: Samples of one optimizer step, over all ranks.
        micro_batch_size: Samples of one micro-batch at most.
        world_size: The number of ranks.
        seed: Fixes the order of the samples, together with the number of the epoch.
    """

    def __init__(
        self, *, num_samples: int, global_batch_size: int, micro_batch_size: int, world_size: int, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.world_size = world_size
        self.seed = seed

    @classmethod
    def of(cls, config: RunConfig, num_samples: int) -> Plan:
        """Returns the plan of a run on so many training samples."""
        return cls(
            num_samples=num_samples,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=config.num_processes,
            seed=config.seed,
        )

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches of an epoch."""
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, epoch: int) -> list[SampleIds]:
        """Returns the global batches of an epoch, which have every sample once; the last batch may be short."""
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_samples)
        return [order[start : start + self.global_batch_size] for start in range(0, len(order), self.global_batch_size)]

    def micro_batches(self, global_batch: SampleIds, rank: int) -> list[MicroBatch]:
        """Returns the micro-batches of one rank in order; all ranks have equally many.

        A short global batch has fewer micro-batches and is spread over them as evenly as possible. The weight of a
        micro-batch is 0.0 only where there are fewer samples than micro-batches.
        """
        num_micro_steps = -(-len(global_batch) // (self.micro_batch_size * self.world_size))
        pieces = np.array_split(global_batch, num_micro_steps * self.world_size)
        mine = pieces[rank :: self.world_size]
        return [MicroBatch(piece, 1.0) if len(piece) else MicroBatch(global_batch[:1], 0.0) for piece in mine]


def evaluation_batches(num_samples: int, *, batch_size: int, rank: int, world_size: int) -> Sequence[range]:
    """Returns this rank's batches of an evaluation, without padding or repetition.

    A batch goes to one rank as a whole. Which samples are computed together, and with that all rounding, therefore
    does not depend on the world size. A rank may get no batch.
    """
    batches = [range(start, min(start + batch_size, num_samples)) for start in range(0, num_samples, batch_size)]
    return batches[rank::world_size]
