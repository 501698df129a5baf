"""Loading the micro-batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset

from records.config import RunConfig
from tasks.interface import Batch, Task
from training.hooks import Hooks
from training.plan import MicroBatch, Plan, SampleIds
from training.seeds import DATA, seed_all
from training.state import TrainingState


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
        # The workers begin by loading torch. This may take long and must not look like a hang.
        self._hooks.on_phase("start" if num_workers else "data", self._state.step)
        items: list[tuple[MicroBatch, tuple[int, ...]]] = [
            # The key has the number of the next step. It stays so: tasks that augment their samples draw from it.
            (micro_batch, (self._config.seed, DATA, backend.rank, self._state.step + index + 1, micro_step))
            for index, global_batch in enumerate(global_batches)
            for micro_step, micro_batch in enumerate(self._plan.micro_batches(global_batch, backend.rank))
        ]
        batches = DataLoader(
            _MicroBatches(self._task, items),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=backend.device.type == "cuda",
            # Forking a process that communicates in background threads may deadlock.
            multiprocessing_context="forkserver" if num_workers else None,
        )
        for batch in batches:
            yield batch
            self._hooks.on_phase("data", self._state.step)


class _MicroBatches(Dataset[Batch]):
    """Micro-batches in order, each with the key of its random stream."""

    def __init__(self, task: Task, items: list[tuple[MicroBatch, tuple[int, ...]]]) -> None:
        self._task = task
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        # A task that augments its samples at random makes the same ones in any worker.
        micro_batch, key = self._items[index]
        seed_all(*key)
        return self._task.collate("train", micro_batch.sample_ids.tolist())
