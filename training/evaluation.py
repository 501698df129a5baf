"""Evaluation of the whole validation split, each sample once, on all ranks together."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from backends.interface import Backend
from records.config import RunConfig
from tasks.interface import Batch, Task
from training.data import Collate, collate_function
from training.hooks import Hooks
from training.losses import finite
from training.plan import SampleIds, evaluation_batches
from training.seeds import EVALUATION, random_seed, seed_all

_ANY_SAMPLE = np.zeros(1, dtype=np.int64)


class Evaluation(NamedTuple):
    """What an evaluation has found, the same on all ranks.

    Attributes:
        metrics: The metrics by name; None for one that is undefined or not finite.
        positions_per_token: Token positions that all ranks computed for each real token; None where samples have none.
    """

    metrics: dict[str, float | None]
    positions_per_token: float | None


class Evaluator:
    """Computes the metrics of a model, which all ranks take part in and which come out the same on all of them."""

    def __init__(self, config: RunConfig, task: Task, backend: Backend, hooks: Hooks) -> None:
        self._config = config
        self._task = task
        self._backend = backend
        self._hooks = hooks

    def evaluate(self, model: torch.nn.Module, step: int) -> Evaluation:
        """Evaluates a model.

        Every rank fills its rows of one matrix, whose other rows are zero. The sum over ranks is what a single
        process would have computed.

        Args:
            model: The task's own module, not the backend's wrapper, whose forward pass may communicate: ranks may
                have unequal numbers of batches.
            step: The step after which it is evaluated, for `on_phase`.
        """
        task, backend = self._task, self._backend
        num_samples, num_columns = task.num_samples("validation"), task.num_evaluation_columns
        shape = num_samples + -(-2 // num_columns), num_columns  # with room for two counts after the rows of samples
        rows = torch.zeros(shape, dtype=torch.float64, device=backend.device)
        num_positions = num_tokens = 0
        model.eval()
        is_sorted, collate = self._config.batching == "sorted", collate_function(task, self._config)
        batches = evaluation_batches(
            num_samples,
            batch_size=self._config.eval_batch_size,
            share=(backend.rank, backend.world_size),
            costs=task.costs("validation") if is_sorted else None,
        )
        with torch.no_grad(), self._uncompiled(), backend.evaluation(model):
            for sample_ids in batches:
                batch, own = self._rows(model, collate, sample_ids, step)
                # Some precisions, as Apex's O1, compute in float32 what a task does in float64.
                rows[sample_ids] = own.to(rows.dtype)
                num_positions += batch.num_positions or 0
                num_tokens += batch.num_tokens or 0
            if backend.capabilities.shards_weights:
                # All ranks gather the weights for each forward pass. Those with fewer batches compute what is not used.
                most = -(-num_samples // (self._config.eval_batch_size * backend.world_size))
                for _ in range(most - len(batches)):
                    self._rows(model, collate, _ANY_SAMPLE, step)
        rows.view(-1)[num_samples * num_columns :][:2] = rows.new_tensor([num_positions, num_tokens])
        reduced = backend.all_reduce(rows).cpu()
        positions, tokens = reduced.view(-1)[num_samples * num_columns :][:2].tolist()
        metrics = task.metrics(reduced[:num_samples])
        shown = {name: finite(value) for name, value in metrics.items()}
        return Evaluation(shown, positions / tokens if tokens else None)

    def _rows(
        self, model: torch.nn.Module, collate: Collate, sample_ids: SampleIds, step: int
    ) -> tuple[Batch, torch.Tensor]:
        """Makes a batch, and computes its rows."""
        self._hooks.on_phase("data", step)
        seed_all(random_seed(self._config.seed, EVALUATION, int(sample_ids[0])))
        batch = collate("validation", sample_ids.tolist()).to(self._backend.device)
        self._hooks.on_phase("evaluation", step)
        with self._backend.autocast():
            return batch, self._task.evaluation_rows(model, batch)

    def value_of_rank_0(self, metrics: dict[str, float | None], name: str) -> float | None:
        """Returns the metric that models are compared by, as rank 0 computed it.

        Metrics are computed on each rank from the same rows, but on another processor the last digit may differ.

        Raises:
            ValueError: The task does not compute this metric.
        """
        if name not in metrics:
            raise ValueError(f"--metric-for-best-model {name}: the task computes {', '.join(metrics)}; choose one")
        of_rank_0 = torch.zeros(1, dtype=torch.float64, device=self._backend.device)
        value = metrics[name]
        if self._backend.rank == 0:
            of_rank_0[0] = math.nan if value is None else value
        return finite(self._backend.all_reduce(of_rank_0).item())

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Compiling once more, for the shapes of the validation split, would take longer than it saves."""
        return torch.compiler.set_stance("force_eager") if self._config.torch_compile else nullcontext()
