"""The diagnosis of a training: where the time of its steps goes, what they send, which weights they make.

Every rank also takes each step alone, as `single` would: in the same loop, with a model of its own and the adapter that
communicates nothing. The time that the real step takes beyond that is communication: the part that computing did not
hide, waiting for slower ranks, and the library's own work. The diagnosis changes no weight of the training.

Libraries build kernels for each new shape of their input (oneDNN for each length of a batch under bf16), and only the
first pass over a batch pays for them. Were this the real step, its difference to the step alone would be no measure of
communication. Therefore the step is taken alone before the real one, too, and what its first passes take beyond later
ones is the time of building. Later passes over a batch still become a per cent or two shorter, and a machine becomes
faster and slower. So the step is taken alone three times before the real one and once after it, and the mean of the two
beside the real one counts. The model of the step alone was then used more recently than that of the real step, and more
of it is still in the caches, so each model is read once more before its step.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from backends.registry import reference_backend
from records.record import DiagnosisRecord
from training.data import Loaded
from training.hooks import Hooks
from training.loop import Trainer
from training.plan import SampleIds
from training.state import TrainingState

# Counting slows a step down; comparisons of time leave these steps out as warm-up.
NUM_COUNTED_STEPS = 3
_NUM_CELLS = 8


class Diagnosis(Hooks):
    """Observes the steps of a training. It is to be added after all other observers, since it measures time."""

    def __init__(self, trainer: Trainer) -> None:
        self._backend = trainer.backend
        self._state = trainer.state
        self._loader = trainer.loader
        self._phases = _Phases(trainer.backend.device)
        self._alone = _Alone(trainer)
        self._fingerprints = _Fingerprints() if trainer.backend.rank == 0 else None
        self._traffic: list[list[tuple[str, int, int]]] = []
        self._whole_seconds: list[float] = []
        self._data_seconds: list[float] = []
        self._first_seconds: list[float] = []
        self._alone_seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        self._sent_bytes: list[int] = []
        self._inner_dtype = ""
        self._rehearsed_seconds: list[float] = []
        self._alone_before: dict[str, float] = {}
        self._step: _Step | None = None
        self._counting = ExitStack()
        self._sent_before = 0
        self._watch_first_linear_layer()
        self._take_fingerprints()

    @override
    def on_phase(self, phase: str, step: int) -> None:
        self._phases.on_phase(phase, step)

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        began = time.perf_counter()
        self._step = self._own_step(global_batch)
        loading = time.perf_counter() - began
        first, second, self._alone_before = (self._alone.take(self._step) for _ in range(3))
        self._first_seconds.append(_passes(first))
        self._rehearsed_seconds.append(loading + _passes(second))
        _read_into_caches(self._state)
        self._backend.barrier()
        self._sent_before = _sent_bytes(_interface())
        self._phases.begin()
        if len(self._traffic) < NUM_COUNTED_STEPS:
            self._traffic.append([])
            self._counting.enter_context(self._backend.count_traffic(self._count))

    @override
    def on_update(self) -> None:
        self._counting.close()
        seconds = self._phases.end()
        self._whole_seconds.append(sum(seconds.values()))
        self._data_seconds.append(seconds["start"] + seconds["data"])  # workers that load data are started, too
        # A rank may have all that it needs while what it sends last is still on its way.
        self._backend.barrier()
        self._sent_bytes.append(_sent_bytes(_interface()) - self._sent_before)
        assert self._step is not None
        alone = self._alone.take(self._step)
        for part, phase in (("forward", "forward"), ("backward", "backward"), ("optimizer", "update")):
            self._alone_seconds[part].append((self._alone_before[phase] + alone[phase]) / 2)
        self._take_fingerprints()

    def _own_step(self, global_batch: SampleIds) -> _Step:
        """Returns the step that begins, with micro-batches that are loaded beside those of the loop."""
        micro_batches = self._loader.micro_batches(self._state.step, [global_batch])
        batches = [micro_batches[number] for number in range(len(micro_batches))]
        return _Step(self._state.step, global_batch, batches)

    def _count(self, operation: str, num_elements: int, num_bytes: int) -> None:
        self._traffic[-1].append((operation, num_elements, num_bytes))

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
            rehearsed_seconds=self._rehearsed_seconds,
            alone_seconds=self._alone_seconds,
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


class _Step(NamedTuple):
    """A step of the training, with the micro-batches of this rank."""

    number: int
    global_batch: SampleIds
    batches: list[Loaded]


class _Phases(Hooks):
    """The seconds of the phases of a step. A GPU is waited for wherever one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._phase, self._since = "data", 0.0

    def begin(self) -> None:
        """A step begins, with its data."""
        self._seconds = defaultdict(float)
        self._phase, self._since = "data", _now(self._device)

    @override
    def on_phase(self, phase: str, step: int) -> None:
        now = _now(self._device)
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def end(self) -> dict[str, float]:
        """Returns the seconds since the step began, by phase."""
        self.on_phase("data", 0)
        return self._seconds


class _Alone:
    """The same loop in one process, with a model of its own and the adapter that communicates nothing."""

    def __init__(self, trainer: Trainer) -> None:
        backend = reference_backend(trainer.backend.options)
        backend.rank, backend.device = trainer.backend.rank, trainer.backend.device  # it takes this rank's share
        self._trainer = Trainer(trainer.config, trainer.task, backend)
        self._trainer.plan = trainer.plan
        self._phases = _Phases(backend.device)
        self._trainer.observe(self._phases)

    def take(self, step: _Step) -> dict[str, float]:
        """Takes a step with the micro-batches of this rank; returns the seconds of its phases."""
        state = self._trainer.state
        _read_into_caches(state)
        state.model.train()
        state.step = step.number
        self._phases.begin()
        self._trainer.train_step(0, step.global_batch, self._loaded(step))
        return self._phases.end()

    def _loaded(self, step: _Step) -> Iterator[Loaded]:
        for loaded in step.batches:
            yield loaded
            self._phases.on_phase("data", step.number)


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


def _passes(seconds: dict[str, float]) -> float:
    """Returns what the forward and the backward passes of a step took."""
    return seconds["forward"] + seconds["backward"]


def _read_into_caches(training: TrainingState) -> None:
    """Reads all that a step reads of a training: its parameters, and the state of its optimizer."""
    states = [value for values in training.optimizer.state.values() for value in values.values()]
    for tensor in [*training.module.parameters(), *(state for state in states if torch.is_tensor(state))]:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a tensor that is spread over ranks
        own.detach().sum()


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
