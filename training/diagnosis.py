"""The diagnosis of a training: where the time of its steps goes, what they send, which weights they make.

Every rank also takes each step alone, on a model of its own and without communication, as `single` would. The time
that the real step takes beyond that is communication: the part that computing did not hide, waiting for slower ranks,
and the library's own work. The diagnosis changes no weight of the training.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from backends.interface import Backend
from backends.registry import reference_backend
from records.config import RunConfig
from records.record import DiagnosisRecord
from tasks.interface import Batch, Task
from training.hooks import Hooks
from training.loop import Trainer
from training.optimizer import build_optimizer
from training.plan import MicroBatch, SampleIds

# Counting slows a step down; comparisons of time leave these steps out as warm-up.
NUM_COUNTED_STEPS = 3
_NUM_CELLS = 8


class Diagnosis(Hooks):
    """Observes the steps of a training. It is to be added after all other observers, since it measures time."""

    def __init__(self, trainer: Trainer) -> None:
        self._task = trainer.task
        self._backend = trainer.backend
        self._state = trainer.state
        self._alone = _Alone(trainer.config, trainer.task, trainer.backend)
        self._fingerprints = _Fingerprints() if trainer.backend.rank == 0 else None
        self._traffic: list[list[tuple[str, int]]] = []
        self._whole_seconds: list[float] = []
        self._data_seconds: list[float] = []
        self._sent_bytes: list[int] = []
        self._inner_dtype = ""
        self._num_targets = 0
        self._micro_batches: list[tuple[MicroBatch, Batch]] = []
        self._counting = ExitStack()
        self._sent_before = 0
        self._step_began = self._wait_began = 0.0
        self._watch_first_linear_layer()
        self._take_fingerprints()

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if phase in ("start", "data"):
            self._wait_began = time.perf_counter()

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        self._num_targets = self._task.num_targets("train", global_batch.tolist())
        self._micro_batches.clear()
        self._data_seconds.append(0.0)
        self._backend.barrier()
        self._sent_before = _sent_bytes(_interface())
        self._step_began = _now(self._backend.device)
        if len(self._traffic) < NUM_COUNTED_STEPS:
            calls: list[tuple[str, int]] = []
            self._traffic.append(calls)
            self._counting.enter_context(self._backend.count_traffic(lambda *call: calls.append(call)))

    @override
    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        self._data_seconds[-1] += time.perf_counter() - self._wait_began
        self._micro_batches.append((micro_batch, batch))

    @override
    def on_update(self) -> None:
        self._counting.close()
        self._whole_seconds.append(_now(self._backend.device) - self._step_began)
        # A rank may have all that it needs while what it sends last is still on its way.
        self._backend.barrier()
        self._sent_bytes.append(_sent_bytes(_interface()) - self._sent_before)
        self._alone.step(
            [(micro_batch.weight / self._num_targets, batch) for micro_batch, batch in self._micro_batches]
        )
        self._take_fingerprints()

    def _watch_first_linear_layer(self) -> None:
        """Notes the dtype of what the first linear layer returns in the first forward pass."""

        def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._inner_dtype = str(output.dtype).removeprefix("torch.")
            handle.remove()

        layers = [layer for layer in self._state.module.modules() if isinstance(layer, torch.nn.Linear)]
        if layers:
            handle = layers[0].register_forward_hook(note)

    def _take_fingerprints(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.take(self._backend.weights(self._state.model))

    def record(self) -> DiagnosisRecord:
        """Returns what was observed on this rank."""
        prints = self._fingerprints
        trainable = [parameter for parameter in self._state.module.parameters() if parameter.requires_grad]
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
            sent_bytes=self._sent_bytes if self._backend.local_rank == 0 else None,
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
            parameters=prints.names if prints else [],
            digests=prints.digests if prints else [],
            sketches=prints.sketches if prints else [],
        )


class _Alone:
    """The same micro-batches in one process: a model, an optimizer and the adapter that communicates nothing."""

    def __init__(self, config: RunConfig, task: Task, backend: Backend) -> None:
        self._task, self._device, self._max_grad_norm = task, backend.device, config.max_grad_norm
        self._backend = reference_backend(backend.options)
        model = task.build_model().to(self._device)
        self._model, self._optimizer = self._backend.setup(model, build_optimizer(config, model))
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def step(self, batches: list[tuple[float, Batch]]) -> None:
        """Takes a step on batches, each with the factor of its summed loss."""
        self._model.train()
        forward = backward = 0.0
        for factor, batch in batches:
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
