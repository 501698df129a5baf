"""What one rank does in a race in which live entrants take turns: it rests between two turns, and times its own.

A rank connects to the race through a socket of its entrant. It says who it is, and from then on the two exchange one
line for each turn: the race says through which step the turn goes, the rank says when the timed steps began and ended.
A rank that rests is blocked in a read, so it takes no processor time of its own.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from typing_extensions import override

from training.clock import Reading
from training.hooks import Hooks
from training.measurements import Measurements

_Message = TypeVar("_Message")


@dataclass(frozen=True)
class Hello:
    """A rank is ready for its first turn.

    Attributes:
        rank: Its rank.
        pid: Its process.
        steps_per_epoch: The number of steps of an epoch.
    """

    rank: int
    pid: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Turn:
    """The race allows some steps.

    Attributes:
        warm_through: The last step that is not timed; the clocks of the ranks start at its end.
        through: The last step of the turn.
    """

    warm_through: int
    through: int


@dataclass(frozen=True)
class TurnTaken:
    """A rank has taken a turn.

    Attributes:
        began: When the timed steps began, in seconds on the machine's monotonic clock.
        ends: When each of them ended; on a GPU, which works on after a step has been given to it, the last one only.
        cpu_seconds: The processor time of all threads of the rank in between.
        instructions: Their instructions in user mode in between; None where they cannot be counted.
    """

    began: float
    ends: list[float]
    cpu_seconds: float
    instructions: int | None


def send(connection: socket.socket, message: Hello | Turn | TurnTaken) -> None:
    """Sends a message as one line."""
    connection.sendall(json.dumps(asdict(message)).encode() + b"\n")


def received(kind: type[_Message], line: bytes) -> _Message:
    """Returns the message in a line.

    Raises:
        ConnectionError: The other side has gone.
    """
    if not line.endswith(b"\n"):
        raise ConnectionError("the other side of the race has gone")
    return kind(**json.loads(line))


class Turns(Hooks):
    """Makes a rank rest until the race gives its entrant a turn, and times the turn."""

    def __init__(self, address: str, hello: Hello, measurements: Measurements, *, on_gpu: bool) -> None:
        """Connects to the race.

        Args:
            address: The path of the entrant's socket.
            hello: Who this rank is.
            measurements: What this rank measures of itself, from which rests are left out.
            on_gpu: Whether a step ends on a GPU, after the processor has gone on.
        """
        self._measurements, self._on_gpu = measurements, on_gpu
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._lines = self._connection.makefile("rb")
        self._turn: Turn | None = None
        self._began, self._reading = self._now()
        self._ends: list[float] = []
        send(self._connection, hello)

    @override
    def on_epoch_begin(self) -> None:
        if self._turn is None:
            self._rest()

    @override
    def on_step_end(self, step: int) -> None:
        assert self._turn is not None
        if step == self._turn.warm_through:
            self._began, self._reading = self._now()
            self._ends = []
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

    def _now(self) -> tuple[float, Reading]:
        """Reads both clocks when all work that was given to the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.monotonic(), self._measurements.clock.read()
