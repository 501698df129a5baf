"""How a rank, or a whole job, fails: of which kind a failure is, and what is known about it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from backends.capabilities import Signs
from watch.heartbeat import Position

# How any library may put it that a connection to another rank has broken.
_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
)


class FailureKind(str, Enum):
    """What went wrong."""

    ERROR = "error"  # a rank raised an error
    NONFINITE = "nonfinite"  # a loss or gradient is not finite, and would be so again
    SILENT = "silent"  # a rank ended without a message: it was killed, or it crashed
    HANG = "hang"  # the ranks are there and do not go on
    STUCK = "stuck"  # other ranks waited for this one in vain
    MISSING = "missing"  # a rank has not begun
    LAUNCHER = "launcher"  # what starts the ranks failed


class PeerStopped(RuntimeError):
    """Another rank ends the run, as all have agreed, and tells why.

    Attributes:
        kind: Of which kind that rank's failure is.
    """

    def __init__(self, why: str, kind: FailureKind = FailureKind.ERROR) -> None:
        super().__init__(f"another rank ends the run: {why}")
        self.kind = kind


@dataclass(frozen=True)
class RankFailure:
    """The error that a rank reported.

    Attributes:
        rank: The rank.
        kind: ERROR or NONFINITE.
        message: The error's type and text, in one line.
        peer_stopped: Whether the rank ended because another one did, by agreement.
        time: When it was reported, in seconds since 1970.
    """

    rank: int
    kind: FailureKind
    message: str
    peer_stopped: bool
    time: float

    def is_consequence(self, signs: Signs) -> bool:
        """Whether this is how another rank's end shows on this rank."""
        return self.peer_stopped or any(phrase in self.message for phrase in (*_LOST_CONNECTION, *signs.lost_peer))


def kind_of(error: BaseException) -> FailureKind:
    """Returns the kind of failure that an error of a rank is."""
    if isinstance(error, PeerStopped):
        return error.kind
    return FailureKind.NONFINITE if isinstance(error, FloatingPointError) else FailureKind.ERROR


@dataclass(frozen=True)
class JobFailure:
    """Why a job failed.

    Attributes:
        kind: What went wrong.
        rank: The rank that failed first; None where it was the launcher, or a rank of another node.
        message: What is known, in one line.
        log: The file in which to read more.
        position: What the rank was doing.
    """

    kind: FailureKind
    rank: int | None
    message: str
    log: Path
    position: Position | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.message
        where = f" ({socket.gethostname()}, {self.position})" if self.position else ""
        return f"rank {self.rank}{where}: {self.message}"
