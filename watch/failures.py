"""How a rank or a whole job fails: the kind of a failure, and what is known about it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from backends.capabilities import Signs
from watch.heartbeat import Position

# How libraries report that a connection to another rank has broken.
_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",  # in gloo: another collective has waited for too long
)


class FailureKind(str, Enum):
    """What went wrong."""

    ERROR = "error"  # a rank raised an error
    NONFINITE = "nonfinite"  # a loss or gradient is not finite, and would be so again
    SILENT = "silent"  # a rank ended without a message: it was killed, or it crashed
    HANG = "hang"  # the ranks are running and make no progress
    STUCK = "stuck"  # other ranks waited for this one without success
    MISSING = "missing"  # a rank did not start
    LAUNCHER = "launcher"  # the starter failed


class PeerStopped(RuntimeError):
    """This rank stops because all ranks have agreed to stop; another rank reports the cause.

    Attributes:
        kind: The kind of that rank's failure.
    """

    def __init__(self, why: str, kind: FailureKind = FailureKind.ERROR) -> None:
        super().__init__(f"another rank stopped the run: {why}")
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
        """Returns whether this error is only the consequence of the end of another rank."""
        return self.peer_stopped or shows_lost_peer(self.message, signs)


def shows_lost_peer(text: str, signs: Signs) -> bool:
    """Returns whether a message or a log says that another rank has been lost."""
    return any(phrase in text for phrase in (*_LOST_CONNECTION, *signs.lost_peer))


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
        rank: The rank that failed first; None where the starter failed, or a rank of another node.
        message: What is known, in one line.
        log: The file in which to read more, if there is one.
        position: What the rank was doing.
        may_lie_elsewhere: Whether this may only be the consequence of a failure on another node.
    """

    kind: FailureKind
    rank: int | None
    message: str
    log: Path | None
    position: Position | None = None
    may_lie_elsewhere: bool = False

    def __str__(self) -> str:
        elsewhere = " (the cause may lie on another node)" if self.may_lie_elsewhere else ""
        if self.rank is None:
            return f"{self.message}{elsewhere}"
        where = f" ({socket.gethostname()}, {self.position})" if self.position else ""
        return f"rank {self.rank}{where}: {self.message}{elsewhere}"

    @property
    def where_to_read_more(self) -> str:
        """A second line for the message on a terminal; empty if there is no file."""
        return f"\n  more in {self.log}" if self.log is not None else ""
