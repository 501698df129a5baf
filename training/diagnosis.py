"""A training that watches its own steps: where their time goes, what they send, which weights they make.

Every rank also takes each step alone, on a model of its own and without communication, as `single`
would. What the real step takes beyond that is communication: the part that computing did not hide,
waiting for slower ranks, and the library's own work. Watching changes no weight.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backends.interface import Backend
from backends.single import SingleBackend
from records.config import RunConfig
from records.progress import ProgressLog
from records.record import DiagnosisRecord
from tasks.interface import Batch, Task
from training.loop import Trainer, build_optimizer
from training.plan import SampleIds

# Counting slows a step down; these are warm-up to everything else.
NUM_COUNTED_STEPS = 3
_NUM_CELLS = 8


class DiagnosedTrainer(Trainer):
    """Trains as `Trainer` does and watches."""

    def __init__(self, config: RunConfig, task: Task, backend: Backend, progress: ProgressLog, **services: Any) -> None:
        super().__init__(config, task, backend, progress, **services)
        self._alone = _Alone(config, task, backend)
        self._fingerprints = _Fingerprints() if backend.rank == 0 else None
        self._traffic: list[list[tuple[str, int]]] = []
        self._whole_seconds: list[float] = []
        self._data_seconds: list[float] = []
        self._sent_bytes: list[int] = []
        self._batches: list[Batch] = []
        self._inner_dtype = ""
        self._watch_first_linear_layer()
        self._take_fingerprints()

    def train_step(self, epoch: int, global_batch: SampleIds, batches: Iterator[Batch]) -> None:
        counting = len(self._traffic) < NUM_COUNTED_STEPS
        if counting:
            self._traffic.append([])
        self._batches.clear()
        self._data_seconds.append(0.0)
        self.backend.barrier()
        sent_before = _sent_bytes(_interface())
        began = _now(self.backend.device)
        with self.backend.count_traffic(lambda *call: self._traffic[-1].append(call)) if counting else nullcontext():
            super().train_step(epoch, global_batch, batches)
        self._whole_seconds.append(_now(self.backend.device) - began)
        self.backend.barrier()  # what this rank sends last may still be on its way when it has all it needs itself
        self._sent_bytes.append(_sent_bytes(_interface()) - sent_before)
        weights = [micro_batch.weight for micro_batch in self.plan.micro_batches(global_batch, self.backend.rank)]
        num_targets = self.task.num_targets("train", global_batch.tolist())
        self._alone.step([weight / num_targets for weight in weights], self._batches)
        self._take_fingerprints()

    def _load(self, global_batches: list[SampleIds]) -> Iterator[Batch]:
        batches = super()._load(global_batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_seconds[-1] += time.perf_counter() - began
            self._batches.append(batch)
            yield batch

    def _watch_first_linear_layer(self) -> None:
        def see(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._inner_dtype = str(output.dtype).removeprefix("torch.")
            handle.remove()

        module = self.backend.unwrap(self.model)
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        if layers:
            handle = layers[0].register_forward_hook(see)

    def _take_fingerprints(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.take(self.backend.weights(self.model))

    def diagnosis(self) -> DiagnosisRecord:
        """What was seen on this rank."""
        prints = self._fingerprints
        trainable = [parameter for parameter in self.backend.unwrap(self.model).parameters() if parameter.requires_grad]
        totals = [Counter[str]() for _ in self._traffic]
        for total, calls in zip(totals, self._traffic, strict=True):
            for operation, num_elements in calls:
                total[operation] += num_elements
        return DiagnosisRecord(
            whole_seconds=self._whole_seconds,
            data_seconds=self._data_seconds,
            alone_seconds=self._alone.seconds,
            inner_dtype=self._inner_dtype,
            reductions=[dict(total) for total in totals],
            num_reductions=[len(calls) for calls in self._traffic],
            interface=_interface(),
            sent_bytes=self._sent_bytes if self.backend.local_rank == 0 else None,
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
            parameters=prints.names if prints else [],
            digests=prints.digests if prints else [],
            sketches=prints.sketches if prints else [],
        )


class _Alone:
    """The same micro-batches in one process: a model, an optimizer and the adapter that communicates nothing."""

    def __init__(self, config: RunConfig, task: Task, backend: Backend) -> None:
        self._task, self._device, self._max_grad_norm = task, backend.device, config.max_grad_norm
        self._backend = SingleBackend(replace(backend.options, settings=SingleBackend.Settings()))
        model = task.build_model().to(self._device)
        self._model, self._optimizer = self._backend.setup(model, build_optimizer(config, model))
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def step(self, factors: list[float], batches: list[Batch]) -> None:
        """Takes a step on batches whose summed losses count with these factors."""
        self._model.train()
        forward = backward = 0.0
        for factor, batch in zip(factors, batches, strict=True):
            began = _now(self._device)
            with self._backend.autocast():
                loss = self._task.loss_sum(self._model, batch.to(self._device)) * factor
            computed = _now(self._device)
            self._backend.backward(loss)
            forward += computed - began
            backward += _now(self._device) - computed
        began = _now(self._device)
        self._backend.step(self._max_grad_norm)
        self.seconds["forward"].append(forward)
        self.seconds["backward"].append(backward)
        self.seconds["optimizer"].append(_now(self._device) - began)


class _Fingerprints:
    """A short form of all weights at some moments, from which two runs can be compared weight by weight.

    Equal digests mean equal bits. A sketch sums a weight's elements, with random signs, into a few
    cells; the distance of two sketches estimates that of the weights (Charikar, Chen and
    Farach-Colton 2002, https://doi.org/10.1007/3-540-45465-9_59).
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.digests: list[list[str]] = []
        self.sketches: list[list[list[float | None]]] = []
        self._signs = torch.empty(0, dtype=torch.int8)

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        self.names = list(weights)
        flat = [weight.detach().cpu().contiguous().reshape(-1) for weight in weights.values()]
        longest = max((len(weight) for weight in flat), default=0)
        if len(self._signs) < longest:
            generator = torch.Generator().manual_seed(0)
            self._signs = torch.randint(0, 2, (longest,), generator=generator, dtype=torch.int8) * 2 - 1
        self.digests.append(
            [hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for weight in flat]
        )
        self.sketches.append([self._sketch(weight) for weight in flat])

    def _sketch(self, weight: torch.Tensor) -> list[float | None]:
        signed = weight.double() * self._signs[: len(weight)]
        rows = torch.nn.functional.pad(signed, (0, -len(signed) % _NUM_CELLS)).reshape(-1, _NUM_CELLS)
        return [cell if math.isfinite(cell) else None for cell in rows.sum(dim=0).tolist()]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _interface() -> str:
    """What the engines told gloo to use, on one node the loopback interface."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def _sent_bytes(interface: str) -> int:
    """Reads the kernel's counter for the network that this process is in; 0 where there is none: proc(5)."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    counters = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return int(counters[interface][8]) if interface in counters else 0
