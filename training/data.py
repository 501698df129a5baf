"""Loading the micro-batches of one rank."""

from __future__ import annotations

import multiprocessing
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, cast

from torch.utils.data import DataLoader, Dataset

from records.config import RunConfig
from tasks.interface import Batch, PackedData, Split, Task
from training.hooks import Hooks
from training.plan import MicroBatch, Plan, SampleIds
from training.seeds import DATA, DROPOUT, random_seed, seed_all
from training.state import TrainingState

# As many as take some milliseconds.
_STEPS_AT_A_TIME = 128
Collate = Callable[[Split, Sequence[int]], Batch]


def collate_function(task: Task, config: RunConfig) -> Collate:
    """Returns what makes a batch of samples in a run: the method of the task for its --batching."""
    return cast("PackedData", task).collate_packed if config.batching == "packed" else task.collate


def may_draw(collate: Callable[..., Batch] | None) -> bool:
    """Returns whether a method that makes batches may use the global generators: whether it is not marked."""
    function = getattr(collate, "__func__", collate)
    return getattr(function, "draws_nothing", None) is not function


class Loaded(NamedTuple):
    """A micro-batch of the plan, with its samples, and what seeds the generators before its forward pass."""

    micro_batch: MicroBatch
    batch: Batch
    forward_seed: int


class Loader:
    """Loads the micro-batches that the plan gives to this rank."""

    def __init__(self, config: RunConfig, task: Task, plan: Plan, state: TrainingState, hooks: Hooks) -> None:
        self._config = config
        self._task = task
        self._plan = plan
        self._state = state
        self._hooks = hooks

    def load(self, global_batches: list[SampleIds]) -> Iterator[Loaded]:
        """Yields this rank's micro-batches of consecutive steps in order; the first step is the current one."""
        num_workers, backend = self._config.dataloader_num_workers, self._state.backend
        # The first worker waits until torch has been loaded, and each imports the task. This may take long and must not
        # look like a hang.
        self._hooks.on_phase("start" if num_workers else "data", self._state.step)
        micro_batches = self.micro_batches(self._state.step, global_batches)
        batches = data_loader(micro_batches, num_workers, for_gpu=backend.device.type == "cuda")
        for number, loaded in enumerate(batches, start=1):
            yield loaded
            self._hooks.on_phase("start" if number < num_workers else "data", self._state.step)

    def micro_batches(self, step: int, global_batches: list[SampleIds]) -> MicroBatches:
        """Returns this rank's micro-batches of the steps from `step` on, in order; each is made when it is read."""
        of_rank = RankPlan(self._plan, self._state.backend.rank, step, global_batches)
        return MicroBatches(collate_function(self._task, self._config), of_rank)


class _Item(NamedTuple):
    """A micro-batch, and three seeds: of making it, of its forward pass, and of its step."""

    micro_batch: MicroBatch
    making: int
    forward: int
    of_step: int


class RankPlan:
    """What one rank computes in consecutive steps.

    Steps are laid out, and seeds mixed, for some steps at a time. Those of an epoch may be many, and take long, and to
    do it for a single one between two steps takes longer than in a row, in which caches hold what it needs.

    Args:
        plan: The plan of the training.
        rank: The rank.
        step: The number of the first of these steps; the first one of a training is 1.
        global_batches: The global batch of each step.
    """

    def __init__(self, plan: Plan, rank: int, step: int, global_batches: list[SampleIds]) -> None:
        self._plan, self._rank, self._global_batches = plan, rank, global_batches
        # The key of a batch has the number of the step after, and that of a forward pass the number of its own. Both
        # stay so: a run that goes on from a checkpoint draws what it would have drawn.
        self._first_key = step + 1
        self._ends = list(accumulate(map(plan.num_micro_steps, global_batches)))
        self._laid_out = range(0)
        self._items: list[_Item] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> _Item:
        if index not in self._laid_out:
            first = bisect_right(self._ends, index) // _STEPS_AT_A_TIME * _STEPS_AT_A_TIME
            self._items = list(self._items_of(slice(first, first + _STEPS_AT_A_TIME)))
            begin = self._ends[first - 1] if first else 0
            self._laid_out = range(begin, begin + len(self._items))
        return self._items[index - self._laid_out.start]

    def _items_of(self, steps: slice) -> Iterator[_Item]:
        for key, global_batch in enumerate(self._global_batches[steps], start=self._first_key + steps.start):
            seed = self._plan.seed
            of_step = random_seed(seed, DROPOUT, key)
            for micro_step, micro_batch in enumerate(self._plan.micro_batches(global_batch, self._rank)):
                making = random_seed(seed, DATA, self._rank, key, micro_step)
                forward = random_seed(seed, DROPOUT, self._rank, key - 1, micro_step)
                yield _Item(micro_batch, making, forward, of_step)


class MicroBatches(Dataset[Loaded]):
    """Micro-batches in order."""

    def __init__(self, collate: Collate, of_rank: RankPlan) -> None:
        self._collate, self._draws = collate, may_draw(collate)
        self._of_rank = of_rank

    def __len__(self) -> int:
        return len(self._of_rank)

    def __getitem__(self, index: int) -> Loaded:
        item = self._of_rank[index]
        if self._draws:  # so that a task which augments its samples makes the same ones in any worker
            seed_all(item.making)
        batch = replace(self._collate("train", item.micro_batch.sample_ids.tolist()), seed=item.of_step)
        return Loaded(item.micro_batch, batch, item.forward)


def data_loader(micro_batches: MicroBatches, num_workers: int, *, for_gpu: bool) -> DataLoader[Loaded]:
    """Returns what makes micro-batches one after the other, in order.

    Args:
        micro_batches: The micro-batches.
        num_workers: The number of processes that make them ahead; 0 for none, so that each is made when it is read.
        for_gpu: Whether they are put into page-locked memory, from which they are copied to a GPU.
    """
    return DataLoader(
        micro_batches,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=for_gpu,
        multiprocessing_context=_context_of_workers(num_workers),
    )


def _context_of_workers(num_workers: int) -> str | None:
    """Returns the start method of data-loader workers, which are new in each epoch; None if there are none.

    They are forks of a process that has loaded torch once, and communicates with nobody: to fork a rank, which
    communicates in background threads, may deadlock. Each worker imports the task itself, since a module of the user's
    may start threads.
    """
    if num_workers == 0:
        return None
    multiprocessing.set_forkserver_preload([__name__])
    return "forkserver"
