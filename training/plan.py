"""The plan: which samples make which global batch, and which rank computes them in which micro-batch.

The global batches of an epoch follow from (seed, epoch) alone. World size, gradient accumulation and --batching only
cut them: whatever they are, the same samples enter the same optimizer step, each exactly once. The loss is a sum over
the global batch, so how its samples are spread over ranks and micro-batches changes it by rounding alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from records.config import Batching, RunConfig
from tasks.interface import Task

SampleIds = npt.NDArray[np.int64]
Costs = npt.NDArray[np.int64]
# Samples of similar lengths need several micro-batches to meet in.
_SORTED_MICRO_STEPS = 2
# Steps from which it is told, before a training, how equal the work of ranks will be.
_NUM_EXPECTED = 20
# Packing takes about a microsecond for each sample.
_MOST_SAMPLES_LOOKED_AT = 200_000


class Layout(NamedTuple):
    """How the samples of a global batch are laid out.

    Attributes:
        batching: As in `RunOptions`.
        costs: How much there is to compute for each sample; None if all cost the same.
        by_micro_step: Whether the samples of a micro-step, on all ranks together, are those that one process has in it.
    """

    batching: Batching
    costs: Costs | None
    by_micro_step: bool = False


_AS_THEY_COME = Layout("padded", None)


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward and backward pass.

    Attributes:
        sample_ids: The numbers of the samples, at least one.
        weight: The factor of their loss. It is 1.0, or 0.0 where no sample is left for this rank: the rank then
            computes a sample of another rank and contributes nothing, so that it takes part in every collective.
        work: How much there is to compute, padding included, in the unit of `Layout.costs`; None without costs.
    """

    sample_ids: SampleIds
    weight: float
    work: int | None


class Plan:
    """Cuts the samples into global batches, and global batches into micro-batches.

    Args:
        num_samples: The number of training samples.
        global_batch_size: Samples of one optimizer step, over all ranks.
        micro_batch_size: Samples of one micro-batch at most; as a mean where micro-batches are packed or sorted.
        world_size: The number of ranks.
        seed: Fixes the order of the samples, together with the number of the epoch.
        layout: How the samples of a global batch are laid out.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        world_size: int,
        seed: int,
        layout: Layout = _AS_THEY_COME,
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.world_size = world_size
        self.seed = seed
        self.layout = layout

    @classmethod
    def of(cls, config: RunConfig, task: Task, *, world_size: int | None = None) -> Plan:
        """Returns the plan of a run on the training samples of a task.

        Args:
            config: The configuration of the run.
            task: The task, prepared.
            world_size: The number of ranks that are there; None for all of them.
        """
        return cls(
            num_samples=task.num_samples("train"),
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=world_size or config.num_processes,
            seed=config.seed,
            layout=Layout(config.batching, task.costs("train"), by_micro_step=config.sync_batchnorm),
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
        return [self._micro_batch(piece, global_batch) for piece in self._pieces(global_batch)[rank :: self.world_size]]

    def num_micro_steps(self, global_batch: SampleIds) -> int:
        """Returns how many micro-batches each rank has of a global batch."""
        number = -(-len(global_batch) // (self.micro_batch_size * self.world_size))
        if self.layout.batching != "sorted" or self.layout.costs is None or self.layout.by_micro_step:
            return number
        return max(number, min(_SORTED_MICRO_STEPS, -(-len(global_batch) // self.world_size)))

    def work(self, global_batch: SampleIds) -> npt.NDArray[np.int64]:
        """Returns how much each rank has to compute in each micro-step, in the unit of `Layout.costs`.

        Padding is counted, and so is what a rank without samples computes. Without costs, each sample counts as one.

        Returns:
            A matrix [micro-steps, ranks].
        """
        micro_batches = [self._micro_batch(piece, global_batch) for piece in self._pieces(global_batch)]
        work = [len(one.sample_ids) if one.work is None else one.work for one in micro_batches]
        return np.array(work, dtype=np.int64).reshape(-1, self.world_size)

    def _micro_batch(self, piece: SampleIds, global_batch: SampleIds) -> MicroBatch:
        samples, weight = (piece, 1.0) if len(piece) else (global_batch[:1], 0.0)
        batching, costs, _ = self.layout
        if costs is None:
            return MicroBatch(samples, weight, None)
        work = int(costs[samples].sum()) if batching == "packed" else _padded_cost(samples, costs)
        return MicroBatch(samples, weight, work)

    def _pieces(self, global_batch: SampleIds) -> list[SampleIds]:
        """Cuts a global batch: first the micro-batch of each rank in the first micro-step, then in the second."""
        batching, costs, by_micro_step = self.layout
        num_micro_steps = self.num_micro_steps(global_batch)
        if by_micro_step:
            together = np.array_split(global_batch, num_micro_steps)
            pieces = [piece for samples in together for piece in np.array_split(samples, self.world_size)]
        elif costs is None or batching == "padded":
            pieces = np.array_split(global_batch, num_micro_steps * self.world_size)
        elif batching == "packed":
            pieces = _of_equal_cost(global_batch, costs[global_batch], num_micro_steps * self.world_size)
        else:
            pieces = _of_similar_cost(global_batch, costs[global_batch], num_micro_steps, self.world_size)
        return pieces


def expected_imbalance(plan: Plan) -> float:
    """Returns the cost of the rank with most to compute over the mean of all ranks; the mean over the first steps.

    It is 1.0 where the costs of samples are not known.
    """
    if plan.layout.costs is None or plan.world_size == 1:
        return 1.0
    of_ranks = [plan.work(batch).sum(axis=0) for batch in plan.epoch(0)[:_NUM_EXPECTED]]
    return float(np.mean([work.max() / work.mean() for work in of_ranks]))


def most_unequal_step(plan: Plan, num_steps: int) -> tuple[int, float]:
    """Finds the step in which one sample keeps all ranks but its own waiting longest.

    It is that whose longest sample is the largest part of its global batch. All steps of the first epoch are looked at,
    which takes a pass over the costs alone; how ranks share the work is computed for the step that was found. The
    short batch at the end of an epoch takes little time and is left out.

    Args:
        plan: The plan.
        num_steps: The steps of the training.

    Returns:
        The number of the step, from 1, and the cost of its rank with most to compute over the mean of all ranks. The
        latter is 1.0 where the costs of samples are not known.
    """
    costs = plan.layout.costs
    if costs is None or plan.world_size == 1:
        return 1, 1.0
    batches = [batch for batch in plan.epoch(0)[:num_steps] if len(batch) == plan.global_batch_size]
    if not batches:
        return 1, 1.0
    of_samples = costs[np.stack(batches)]
    number = int(np.argmax(of_samples.max(axis=1) / of_samples.sum(axis=1)))
    work = plan.work(batches[number]).sum(axis=0)
    return number + 1, float(work.max() / work.mean())


def heaviest_share(plan: Plan, num_steps: int) -> list[MicroBatch]:
    """Returns the micro-batch in which a rank computes most, after the one before it if a step has several.

    Args:
        plan: The plan.
        num_steps: The steps of the training. Those of the first epoch are looked at, as far as this takes a moment.
    """
    batches = plan.epoch(0)[: min(num_steps, max(1, _MOST_SAMPLES_LOOKED_AT // plan.global_batch_size))]
    work = [plan.work(batch) for batch in batches]
    number = int(np.argmax([of_batch.max() for of_batch in work]))
    micro_step, rank = divmod(int(work[number].argmax()), plan.world_size)
    share = plan.micro_batches(batches[number], rank)
    return share[max(0, micro_step - 1) :][:2]


def _of_equal_cost(samples: SampleIds, costs: Costs, num_pieces: int) -> list[SampleIds]:
    """Spreads samples so that the pieces cost as much as each other, as far as a simple rule can tell.

    The samples are taken from the most to the least expensive, and each goes where there is least so far (Graham 1969,
    "Bounds on Multiprocessing Timing Anomalies", https://doi.org/10.1137/0117039).
    """
    pieces: list[list[int]] = [[] for _ in range(num_pieces)]
    loads = [(0, piece) for piece in range(num_pieces)]
    for number in np.argsort(-costs, kind="stable").tolist():
        load, piece = loads[0]
        pieces[piece].append(number)
        heapq.heapreplace(loads, (load + int(costs[number]), piece))
    return [samples[piece] for piece in pieces]


def _of_similar_cost(samples: SampleIds, costs: Costs, num_micro_steps: int, world_size: int) -> list[SampleIds]:
    """Cuts samples, from the most to the least expensive, into pieces, and gives them to the ranks.

    The pieces have equally many samples or, with padding, cost about as much as each other: whichever leaves less to
    the rank that gets most.
    """
    order, num_pieces = np.argsort(-costs, kind="stable"), num_micro_steps * world_size
    cuts = [np.array_split(order, num_pieces)]
    # One process may cut each piece into equal numbers for its devices.
    if world_size > 1 and len(order) > num_pieces:
        cuts.append(np.split(order, _ends_of_equal_cost(costs[order].clip(min=1).tolist(), num_pieces)))
    _, pieces = min((_given_to_ranks(cut, costs, world_size) for cut in cuts), key=lambda given: given[0])
    return [samples[piece] for piece in pieces]


def _ends_of_equal_cost(costs: list[int], num_pieces: int) -> list[int]:
    """Cuts samples, from the most to the least expensive, so that the most expensive piece costs as little as possible.

    Each sample of a piece costs as much as the first one, to which it is padded.

    Returns:
        Where the pieces end, without the last one; each has at least one sample.
    """

    def ends(most: int) -> list[int]:
        found = [0]
        for left in reversed(range(num_pieces)):
            found.append(min(found[-1] + most // costs[found[-1]], len(costs) - left))
        return found[1:]

    enough = costs[0] * -(-len(costs) // num_pieces)
    most = bisect_left(range(enough), True, lo=costs[0], key=lambda most: ends(most)[-1] == len(costs))
    return ends(most)[:-1]


def _given_to_ranks(pieces: list[SampleIds], costs: Costs, world_size: int) -> tuple[int, list[SampleIds]]:
    """In each micro-step, gives the cheaper pieces to the ranks that have got more before.

    Returns:
        The cost of the rank that gets most, and the pieces in their new order.
    """
    loads, given = [0] * world_size, list[SampleIds]()
    for start in range(0, len(pieces), world_size):
        cheapest_first = sorted(pieces[start : start + world_size], key=lambda piece: _padded_cost(piece, costs))
        by_load = sorted(range(world_size), key=lambda rank: -loads[rank])
        given += [piece for _, piece in sorted(zip(by_load, cheapest_first, strict=True), key=lambda pair: pair[0])]
        loads = [load + _padded_cost(piece, costs) for load, piece in zip(loads, given[start:], strict=True)]
    return max(loads), given


def _padded_cost(samples: SampleIds, costs: Costs) -> int:
    return len(samples) * int(costs[samples].max(initial=0))


def evaluation_batches(
    num_samples: int, *, batch_size: int, share: tuple[int, int], costs: Costs | None = None
) -> Sequence[SampleIds]:
    """Returns this rank's batches of an evaluation, without padding or repetition.

    A batch goes to one rank as a whole. Which samples are computed together, and with that all rounding, therefore
    does not depend on the world size. A rank may get no batch.

    Args:
        num_samples: The number of validation samples.
        batch_size: Samples of a batch.
        share: The rank, and the number of ranks.
        costs: Batches are made of samples of similar cost; None for samples as they come.
    """
    order = np.arange(num_samples) if costs is None else np.argsort(costs, kind="stable")
    batches = [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]
    rank, world_size = share
    return batches[rank::world_size]
