"""The diagnosis of a training: where the time of its steps goes, what they send, which weights they make.

Every rank also takes each step alone, on a model of its own and without communication, as `single` would. The time
that the real step takes beyond that is communication: the part that computing did not hide, waiting for slower ranks,
and the library's own work. The diagnosis changes no weight of the training.

Libraries build kernels for each new shape of their input (oneDNN for each length of a batch under bf16), and only the
first pass over a batch pays for them. Were this the real step, its difference to the step alone would be no measure of
communication. Therefore each micro-batch first passes through the model of its own, and the real step waits meanwhile.
What this first pass takes beyond that of the step alone is the time of building. The ranks then go on as far apart as
they were.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
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
from training.loop import Trainer, require_gradients
from training.optimizer import build_optimizer
from training.plan import MicroBatch, SampleIds
from training.seeds import DROPOUT, seed_all

# Counting slows a step down; comparisons of time leave these steps out as warm-up.
NUM_COUNTED_STEPS = 3
_NUM_CELLS = 8


class Diagnosis(Hooks):
    """Observes the steps of a training. It is to be added after all other observers, since it measures time."""

    def __init__(self, trainer: Trainer) -> None:
        self._task = trainer.task
        self._backend = trainer.backend
        self._state = trainer.state
        self._plan = trainer.plan
        self._alone = _Alone(trainer.config, trainer.task, trainer.backend)
        self._fingerprints = _Fingerprints() if trainer.backend.rank == 0 else None
        self._traffic: list[list[tuple[str, int, int]]] = []
        self._whole_seconds: list[float] = []
        self._data_seconds: list[float] = []
        self._first_seconds: list[float] = []
        self._sent_bytes: list[int] = []
        self._inner_dtype = ""
        self._num_targets = self._num_micro_batches = 0
        self._micro_batches: list[_MicroStep] = []
        self._counting = ExitStack()
        self._is_paused = False
        self._sent_before = 0
        self._step_began = self._data_began = 0.0
        self._watch_first_linear_layer()
        self._take_fingerprints()

    @override
    def on_phase(self, phase: str, step: int) -> None:
        now = _now(self._backend.device)  # a GPU is waited for at the same points as in the step alone
        if phase == "data" and self._micro_batches:
            self._data_began = now
        elif phase == "forward" and self._data_seconds:
            self._data_seconds[-1] += now - self._data_began

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        self._num_targets = self._task.num_targets("train", global_batch.tolist())
        self._num_micro_batches = len(self._plan.micro_batches(global_batch, self._backend.rank))
        self._micro_batches.clear()
        self._data_seconds.append(0.0)
        self._first_seconds.append(0.0)
        self._backend.barrier()
        self._sent_before = _sent_bytes(_interface())
        self._step_began = self._data_began = _now(self._backend.device)
        if len(self._traffic) < NUM_COUNTED_STEPS:
            self._traffic.append([])
            self._counting.enter_context(self._backend.count_traffic(self._count))

    @override
    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        """Passes it through the model of the step alone, while the clock of the step stands still."""
        stopped, sent = _now(self._backend.device), _sent_bytes(_interface())
        self._is_paused = True
        number = len(self._micro_batches)
        self._micro_batches.append(
            _MicroStep(
                factor=micro_batch.weight / self._num_targets,
                batch=batch,
                random_key=(self._backend.rank, self._state.step, number),
            )
        )
        self._first_seconds[-1] += self._alone.rehearse(self._micro_batches[-1])
        if len(self._micro_batches) == self._num_micro_batches:
            self._restore_distances(stopped - self._step_began)
        self._is_paused = False
        self._sent_before += _sent_bytes(_interface()) - sent
        paused = time.perf_counter() - stopped
        self._step_began += paused
        self._data_began += paused

    @override
    def on_update(self) -> None:
        self._counting.close()
        self._whole_seconds.append(_now(self._backend.device) - self._step_began)
        # A rank may have all that it needs while what it sends last is still on its way.
        self._backend.barrier()
        self._sent_bytes.append(_sent_bytes(_interface()) - self._sent_before)
        self._alone.step(self._micro_batches)
        self._take_fingerprints()

    def _count(self, operation: str, num_elements: int, num_bytes: int) -> None:
        if not self._is_paused:
            self._traffic[-1].append((operation, num_elements, num_bytes))

    def _restore_distances(self, elapsed: float) -> None:
        """Lets each rank go on as long after the first one as it was when it stopped, `elapsed` into its step.

        Ranks communicate after their last micro-batch, and the faster ones then wait: so they do here, and only the
        time of the rehearsals, which differs from rank to rank, is gone.
        """
        seconds = torch.tensor([elapsed], dtype=torch.float64, device=self._backend.device)
        ahead = float(self._backend.all_reduce(seconds, "min"))
        self._backend.barrier()
        time.sleep(elapsed - ahead)

    def _watch_first_linear_layer(self) -> None:
        """Notes the dtype of what the first linear layer returns in the first forward pass."""

        def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._inner_dtype = str(output.dtype).removeprefix("torch.")
            handle.remove()

        layers = [layer for layer in self._state.module.modules() if isinstance(layer, torch.nn.Linear)]
        if layers:
            handle = layers[0].register_forward_hook(note)

    def _take_fingerprints(self) -> None:
        if self._fingerprints is None and not self._backend.capabilities.shards_weights:
            return
        whole = {}
        for name, weight in self._backend.weights(self._state.model).items():
            tensor = self._backend.whole(weight.detach())
            if self._fingerprints is not None:
                whole[name] = tensor
        if self._fingerprints is not None:
            self._fingerprints.take(whole)

    def _sharded_bytes(self) -> int:
        """Returns the size of the weights that must be gathered before they compute; 0 where each rank holds all."""
        if not self._backend.capabilities.shards_weights:
            return 0
        return sum(weight.numel() * weight.element_size() for weight in self._state.module.parameters())

    def record(self) -> DiagnosisRecord:
        """Returns what was observed on this rank."""
        prints = self._fingerprints
        trainable = [parameter for parameter in self._state.module.parameters() if parameter.requires_grad]
        elements = [Counter[str]() for _ in self._traffic]
        num_bytes = [Counter[str]() for _ in self._traffic]
        for number, calls in enumerate(self._traffic):
            for operation, size, size_in_bytes in calls:
                elements[number][operation] += size
                num_bytes[number][operation] += size_in_bytes
        return DiagnosisRecord(
            whole_seconds=self._whole_seconds,
            data_seconds=self._data_seconds,
            first_seconds=self._first_seconds,
            alone_seconds=self._alone.seconds,
            inner_dtype=self._inner_dtype,
            reductions=[dict(total) for total in elements],
            reduced_bytes=[dict(total) for total in num_bytes],
            num_reductions=[len(calls) for calls in self._traffic],
            interface=_interface(),
            sent_bytes=self._sent_bytes if self._backend.local_rank == 0 else None,
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
            gradient_elements=sum(parameter.numel() for parameter in trainable),
            sharded_bytes=self._sharded_bytes(),
            parameters=prints.names if prints else [],
            digests=prints.digests if prints else [],
            sketches=prints.sketches if prints else [],
        )


@dataclass(frozen=True)
class _MicroStep:
    """A micro-batch, the factor of its summed loss, and what seeds its dropout."""

    factor: float
    batch: Batch
    random_key: tuple[int, int, int]


class _Alone:
    """The same micro-batches in one process: a model, an optimizer and the adapter that communicates nothing.

    It does all that the loop does between the phases of a step, so that none of it counts as communication.
    """

    def __init__(self, config: RunConfig, task: Task, backend: Backend) -> None:
        self._config, self._task, self._device = config, task, backend.device
        self._backend = reference_backend(backend.options)
        model = task.build_model().to(self._device)
        self._model, self._optimizer = self._backend.setup(model, build_optimizer(config, model))
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def rehearse(self, micro_step: _MicroStep) -> float:
        """Takes a forward and a backward pass, of which nothing remains; returns the seconds."""
        self._model.train()
        seconds = sum(self._pass(micro_step))
        self._optimizer.zero_grad()
        return seconds

    def step(self, micro_steps: list[_MicroStep]) -> None:
        """Takes a step."""
        self._model.train()
        passes = [self._pass(micro_step) for micro_step in micro_steps]
        began = _now(self._device)
        if not self._config.find_unused_parameters:
            require_gradients(self._backend, dict(self._model.named_parameters()))
        self._backend.step(self._config.max_grad_norm)
        self.seconds["forward"].append(sum(forward for forward, _ in passes))
        self.seconds["backward"].append(sum(backward for _, backward in passes))
        self.seconds["optimizer"].append(_now(self._device) - began)

    def _pass(self, micro_step: _MicroStep) -> tuple[float, float]:
        """Returns the seconds of the forward and of the backward pass."""
        batch = micro_step.batch.to(self._device)
        began = _now(self._device)
        seed_all(self._config.seed, DROPOUT, *micro_step.random_key)
        with self._backend.autocast():
            loss = self._task.loss_sum(self._model, batch) * micro_step.factor
        computed = _now(self._device)
        self._backend.backward(loss)
        return computed - began, _now(self._device) - computed


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
    """What the starters told gloo to use, on one node the loopback interface."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def _sent_bytes(interface: str) -> int:
    """Reads the kernel's counter for the network that this process is in; 0 where there is none: proc(5)."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    counters = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return int(counters[interface][8]) if interface in counters else 0
