"""What each rank measures of its own steps, and its heartbeat."""

from __future__ import annotations

import time

from typing_extensions import override

from tasks.interface import Batch
from training.clock import ProcessorClock
from training.hooks import Hooks
from training.plan import MicroBatch, SampleIds
from watch.heartbeat import Heartbeat


class Measurements(Hooks):
    """Keeps the heartbeat of a rank and measures its steps.

    Attributes:
        clock: The second clock of the rank.
        step_seconds: For each step, the wall time since the end of the step before, or since the start of the epoch.
        own_seconds: For each step, the part of it in which no other rank can delay this one.
        cpu_seconds: For each step, the processor time of all threads within `step_seconds`.
        samples: For each step, the number of samples of this rank.
        tokens: For each step, the number of real tokens of this rank; empty where samples have no tokens.
        positions: For each step, the number of token positions that this rank computed, padding included; empty, too.
        work: For each step, what this rank computed, by the costs of its samples, or in positions, or in samples.
        first_step_at: When the first step of this process was complete, in seconds since 1970; None before.
    """

    def __init__(self, heartbeat: Heartbeat, clock: ProcessorClock) -> None:
        self._heartbeat = heartbeat
        self.clock = clock
        self.step_seconds: list[float] = []
        self.own_seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.samples: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.work: list[int] = []
        self.first_step_at: float | None = None
        self._instructions: list[int | None] = []
        self._step_began = 0.0
        self._reading = clock.read()
        self._own_seconds_before = 0.0
        self._samples = self._tokens = self._positions = self._work = 0
        self._has_tokens = False

    @override
    def on_phase(self, phase: str, step: int) -> None:
        self._heartbeat.enter(phase, step)

    @override
    def on_epoch_begin(self) -> None:
        self._step_began = time.perf_counter()
        self._reading = self.clock.read()

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        self._own_seconds_before = self._heartbeat.own_seconds
        self._samples = self._tokens = self._positions = self._work = 0

    @override
    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        self._has_tokens = batch.num_tokens is not None
        if micro_batch.weight:
            self._samples += len(micro_batch.sample_ids)
            self._tokens += batch.num_tokens or 0
        # A rank without samples computes one of another rank.
        self._positions += batch.num_positions or 0
        unplanned = batch.num_positions or len(micro_batch.sample_ids)
        self._work += unplanned if micro_batch.work is None else micro_batch.work

    def rest_begins(self) -> None:
        """The rank waits for something outside of the training, which is no time of a step."""
        self._heartbeat.enter("rest")

    def rest_ends(self) -> None:
        """The rank goes on after a rest."""
        self._heartbeat.enter("start")
        self.on_epoch_begin()

    @override
    def on_step_end(self, step: int) -> None:
        if self.first_step_at is None:
            self.first_step_at = time.time()
        self.own_seconds.append(self._heartbeat.own_seconds - self._own_seconds_before)
        now = time.perf_counter()
        self.step_seconds.append(now - self._step_began)
        self._step_began = now
        reading = self.clock.read()
        used = reading.since(self._reading)
        self._reading = reading
        self.cpu_seconds.append(used.cpu_seconds)
        self._instructions.append(used.instructions)
        self.samples.append(self._samples)
        self.work.append(self._work)
        if self._has_tokens:
            self.tokens.append(self._tokens)
            self.positions.append(self._positions)

    @property
    def instructions(self) -> list[int] | None:
        """For each step, the instructions of all threads within `step_seconds`; None if some were not counted."""
        counted = [count for count in self._instructions if count is not None]
        return counted if len(counted) == len(self._instructions) else None
