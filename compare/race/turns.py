"""What one rank does in a race in which live entrants take turns: it rests between two turns, and times its own.

A rank connects to the race through a socket of its entrant. It says who it is, and from then on the two exchange one
line for each turn: the race says through which step the turn goes, the rank says when the timed steps began and ended.
A rank that rests is blocked in a read, so it takes no processor time of its own.
"""

from __future__ import annotations

import time

import torch
from typing_extensions import override

from compare.race.messages import Hello, Turn, TurnTaken, connect, received, send
from training.clock import Reading
from training.hooks import Hooks
from training.measurements import Measurements


class Turns(Hooks):
    """Makes a rank rest until the race gives its entrant a turn, and times the turn."""

    def __init__(self, address: str, hello: Hello, measurements: Measurements, *, on_gpu: bool) -> None:
        """Connects to the race.

        Args:
            address: Where the race listens to the ranks of its entrant.
            hello: Who this rank is.
            measurements: What this rank measures of itself, from which rests are left out.
            on_gpu: Whether a step ends on a GPU, after the processor has gone on.
        """
        self._measurements, self._on_gpu = measurements, on_gpu
        self._connection = connect(address)
        self._lines = self._connection.makefile("rb")
        self._turn: Turn | None = None
        self._start_timing()
        send(self._connection, hello)

    @override
    def on_epoch_begin(self) -> None:
        if self._turn is None:
            self._rest()

    @override
    def on_step_end(self, step: int) -> None:
        assert self._turn is not None
        if step == self._turn.warm_through:
            self._start_timing()
        elif step == self._turn.through:
            ended, reading = self._now()
            send(self._connection, TurnTaken(self._began, [*self._ends, ended], *reading.since(self._reading)))
            self._rest()
        elif step > self._turn.warm_through and not self._on_gpu:
            self._ends.append(time.monotonic())

    def _rest(self) -> None:
        self._measurements.rest_begins()
        self._turn = received(Turn, self._lines.readline())
        self._measurements.rest_ends()
        self._start_timing()  # for the one step of an epoch that is left, all of which is timed

    def _start_timing(self) -> None:
        self._began, self._reading = self._now()
        self._ends: list[float] = []

    def _now(self) -> tuple[float, Reading]:
        """Reads both clocks when all work that was given to the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.monotonic(), self._measurements.clock.read()
