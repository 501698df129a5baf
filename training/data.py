"""Loading the micro-batches of one rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch.utils.data import DataLoader, Dataset

from records.config import RunConfig
from tasks.interface import Batch, PackedData, Split, Task
from training.hooks import Hooks
from training.plan import MicroBatch, Plan, SampleIds
from training.seeds import DATA, DROPOUT, random_seed, seed_micro_batch
from training.state import TrainingState

Collate = Callable[[Split, Sequence[int]], Batch]


def collate_function(task: Task, config: RunConfig) -> Collate:
    """Returns what makes a batch of samples in a run: the method of the task for its --batching."""
    return cast("PackedData", task).collate_packed if config.batching == "packed" else task.collate


def context_of_workers(num_workers: int) -> str | None:
    """Returns the start method of data-loader workers, which are new in each epoch; None if there are none.

    They are forks of a process that has loaded torch once, and communicates with nobody: to fork a rank, which
    communicates in background threads, may deadlock. Each worker imports the task itself, since a module of the user's
    may start threads.
    """
    if num_workers == 0:
        return None
    multiprocessing.set_forkserver_preload([__name__])
    return "forkserver"


class Loader:
    """Loads the micro-batches that the plan gives to this rank."""

    def __init__(self, config: RunConfig, task: Task, plan: Plan, state: TrainingState, hooks: Hooks) -> None:
        self._config = config
        self._task = task
        self._plan = plan
        self._state = state
        self._hooks = hooks

    def load(self, global_batches: list[SampleIds]) -> Iterator[Batch]:
        """Yields this rank's micro-batches of consecutive steps in order; the first step is the current one."""
        num_workers, backend = self._config.dataloader_num_workers, self._state.backend
        # The first worker waits until torch has been loaded, and each imports the task. This may take long and must not
        # look like a hang.
        self._hooks.on_phase("start" if num_workers else "data", self._state.step)
        batches = DataLoader(
            self.micro_batches(self._state.step, global_batches),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=backend.device.type == "cuda",
            multiprocessing_context=context_of_workers(num_workers),
        )
        for number, batch in enumerate(batches, start=1):
            yield batch
            self._hooks.on_phase("start" if number < num_workers else "data", self._state.step)

    def micro_batches(self, step: int, global_batches: list[SampleIds]) -> MicroBatches:
        """Returns this rank's micro-batches of the steps from `step` on, in order; each is made when it is read."""
        rank, seed = self._state.backend.rank, self._config.seed
        items = [
            # The key has the number of the step after. It stays so: tasks that augment their samples draw from it.
            _Item(micro_batch, (seed, DATA, rank), key, micro_step, random_seed(seed, DROPOUT, key))
            for key, global_batch in enumerate(global_batches, start=step + 1)
            for micro_step, micro_batch in enumerate(self._plan.micro_batches(global_batch, rank))
        ]
        return MicroBatches(collate_function(self._task, self._config), items)


class _Item(NamedTuple):
    """A micro-batch, the random stream that makes it and where in this stream it is, and the seed of its step."""

    micro_batch: MicroBatch
    stream: tuple[int, ...]
    step: int
    micro_step: int
    seed: int


class MicroBatches(Dataset[Batch]):
    """Micro-batches in order."""

    def __init__(self, collate: Collate, items: list[_Item]) -> None:
        self._collate = collate
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        # A task that augments its samples at random makes the same ones in any worker.
        item = self._items[index]
        seed_micro_batch(*item.stream, step=item.step, micro_step=item.micro_step)
        return replace(self._collate("train", item.micro_batch.sample_ids.tolist()), seed=item.seed)
