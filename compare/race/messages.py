"""What a race, the ranks of its entrants, and the keepers of their nodes tell each other: one line for each message.

A race listens on a socket of its machine, or, if ranks are on other machines, on an address of its own network. There,
who connects first says the secret word that is a part of the address.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

# What the address of a race on other machines begins with; that on this machine is the path of a socket.
_OF_NETWORK = "tcp"
_SECONDS_TO_SAY_THE_WORD = 5.0
# For so long a machine may not be heard of.
_SECONDS_OF_SILENCE = 60
# Set by the keeper of a node for all that it starts.
NODE_VARIABLE = "LOCKSTEP_NODE_OF_RACE"


@dataclass(frozen=True)
class Hello:
    """A rank is ready for its first turn, or a keeper for its first order.

    Attributes:
        rank: The rank; None for a keeper.
        pid: Its process.
        steps_per_epoch: The number of steps of an epoch; 0 for a keeper.
        node: What tells the node from others, if it has a keeper.
    """

    rank: int | None
    pid: int
    steps_per_epoch: int
    node: str = field(default_factory=lambda: os.environ.get(NODE_VARIABLE, ""))


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
        began: When the timed steps began, in seconds on its machine's monotonic clock.
        ends: When each of them ended; on a GPU, which works on after a step has been given to it, the last one only.
        cpu_seconds: The processor time of all threads of the rank in between.
        instructions: Their instructions in user mode in between; None where they cannot be counted.
    """

    began: float
    ends: list[float]
    cpu_seconds: float
    instructions: int | None


@dataclass(frozen=True)
class Order:
    """What the processes of a node are to do.

    Attributes:
        do: To rest; to let the ranks go on, and what they have started; or to go on altogether.
        rank_pids: The processes of the ranks.
    """

    do: Literal["rest", "race", "go on"]
    rank_pids: list[int]


@dataclass(frozen=True)
class Rested:
    """The processes of a node rest, after they have raced.

    Attributes:
        machine: What tells the node's machine from others.
        busy_share: The share of its cores that was busy meanwhile.
        own_share: The share that these processes took.
    """

    machine: str
    busy_share: float
    own_share: float


_Message = TypeVar("_Message", Hello, Turn, TurnTaken, Order, Rested)


def send(connection: socket.socket, message: Hello | Turn | TurnTaken | Order | Rested) -> None:
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


def is_of_network(address: str) -> bool:
    """Whether a race at this address has ranks on other machines."""
    return address.startswith(f"{_OF_NETWORK}:")


def connect(address: str) -> socket.socket:
    """Connects to a race.

    Raises:
        OSError: It cannot be reached.
    """
    if not is_of_network(address):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    _, host, port, word = address.split(":")
    connection = _between_machines(socket.create_connection((host, int(port))))
    connection.sendall(f"{word}\n".encode())
    return connection


def _between_machines(connection: socket.socket) -> socket.socket:
    """Sends messages at once, and notices within a minute that the other machine is gone (tcp(7))."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS_OF_SILENCE // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SECONDS_OF_SILENCE // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SECONDS_OF_SILENCE)
    return connection


class Listener:
    """Where the ranks of an entrant, and the keepers of its nodes, connect to the race.

    Attributes:
        address: What `connect` needs.
        socket: Can be read when somebody connects.
    """

    def __init__(self, place: Path | str, backlog: int) -> None:
        """Listens.

        Args:
            place: The path of the socket to create, or the address of this machine that others reach.
            backlog: How many will connect.
        """
        self._word = secrets.token_hex(16)
        if isinstance(place, Path):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(str(place))
            self.address = str(place)
        else:
            self.socket = socket.socket(socket.AF_INET)
            self.socket.bind((place, 0))
            self.address = f"{_OF_NETWORK}:{place}:{self.socket.getsockname()[1]}:{self._word}"
        self.socket.listen(backlog)
        self.socket.setblocking(False)

    def accept(self) -> socket.socket | None:
        """Returns the connection of who has just connected; None if that is a stranger, or has gone again."""
        try:
            connection, _ = self.socket.accept()
        except BlockingIOError:
            return None
        connection.setblocking(True)
        if not is_of_network(self.address):
            return connection
        _between_machines(connection)
        said, until = b"", time.monotonic() + _SECONDS_TO_SAY_THE_WORD
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and len(said) <= len(self._word):
                connection.settimeout(max(0.001, until - time.monotonic()))
                if not (one := connection.recv(1)):
                    break
                said += one
        if not secrets.compare_digest(said, f"{self._word}\n".encode()):
            connection.close()
            return None
        connection.settimeout(None)
        return connection
