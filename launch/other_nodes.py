"""What the launchers of a job's nodes tell each other while ranks run: that one of them has failed, and why.

Without it, a node would find out from its libraries: at once where connections of its ranks break, after minutes where
they wait for ranks that have not connected yet, and never why. Node 0 is connected with all others (launch/meeting.py)
and passes on what one of them tells.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from launch.errors import one_line
from launch.nodes import Nodes
from launch.signals import Interrupted
from watch.failures import FailureKind, JobFailure

_MOST_BYTES = 65536


@dataclass(frozen=True)
class _Word:
    """How the ranks of a node have ended.

    Attributes:
        node_rank: The number of the node.
        message: Why they failed; None if they did not.
        kind: The kind of the failure.
        is_cause: Whether the failure began there, as far as can be seen from there.
    """

    node_rank: int
    message: str | None = None
    kind: FailureKind = FailureKind.ERROR
    is_cause: bool = True


_WORDS = TypeAdapter(_Word)


class OtherNodes:
    """The launchers of the other nodes of a job. Each of them says one word of its own, at the end."""

    def __init__(self, nodes: Nodes, connections: Mapping[int, socket.socket]) -> None:
        """Takes over connections, which are closed at the end.

        Args:
            nodes: The nodes of the job, and which of them this is.
            connections: On node 0, those to all other nodes by their numbers; on any other node, that to node 0.
        """
        self._node_rank, self._connections = nodes.node_rank, dict(connections)
        self._received = dict.fromkeys(connections, b"")
        self._go_on = set(range(nodes.num_nodes))
        self._failures: list[_Word] = []
        for connection in connections.values():
            connection.settimeout(None)

    def __enter__(self) -> OtherNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connections; an error is told to the others, unless they know how the ranks here have ended."""
        if self._node_rank in self._go_on:
            interrupted = f"its command was interrupted by {error}"
            why = None if error is None else interrupted if isinstance(error, Interrupted) else one_line(error)
            self._say(_Word(self._node_rank, why))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                # What has come and is not read would make the system drop what was said last (tcp(7)).
                connection.setblocking(False)
                while connection.recv(_MOST_BYTES):
                    pass
            connection.close()
        self._connections.clear()

    def have_failed(self) -> bool:
        """Whether another node has failed; returns at once."""
        self._listen(0.0)
        return bool(self._failures)

    @property
    def know_the_cause(self) -> bool:
        """Whether another node has told of a failure that began there."""
        return any(word.is_cause for word in self._failures)

    def failure(self, seconds: float) -> JobFailure | None:
        """Returns the failure that began on another node, for which this waits.

        Returns:
            That failure. If none is told in time, or all others have ended and know none, the first that was told; None
            if there is none.
        """
        deadline = time.monotonic() + seconds
        while not self.know_the_cause:
            left = deadline - time.monotonic()
            if left <= 0 or not self._connections or self._go_on <= {self._node_rank}:
                break
            self._listen(left)
        word = next((word for word in self._failures if word.is_cause), next(iter(self._failures), None))
        if word is None:
            return None
        message = f"node {word.node_rank}: {word.message}"
        return JobFailure(word.kind, None, message, None, may_lie_elsewhere=not word.is_cause)

    def tell(self, failure: JobFailure | None, *, is_cause: bool = True) -> None:
        """Tells the others how the ranks of this node have ended.

        Args:
            failure: Why they have failed; None if they have not.
            is_cause: Whether the failure began here, as far as can be seen from here.
        """
        self._go_on.discard(self._node_rank)
        if failure is None:
            self._say(_Word(self._node_rank))
        else:
            message = one_line(replace(failure, may_lie_elsewhere=False))
            self._say(_Word(self._node_rank, message, failure.kind, is_cause))

    def _listen(self, seconds: float) -> None:
        """Waits for words, and passes them on."""
        readable = wait(list(self._connections.values()), seconds)
        for number in [number for number, connection in self._connections.items() if connection in readable]:
            for word in self._words_of(number):
                self._go_on.discard(word.node_rank)
                if word.message is not None:
                    self._failures.append(word)
                self._say(word, except_to=number)

    def _words_of(self, number: int) -> Iterator[_Word]:
        """Yields what has come from a node; if its connection has ended before it said a word, it has failed."""
        new = b""
        with contextlib.suppress(OSError):
            new = self._connections[number].recv(_MOST_BYTES)
        *lines, self._received[number] = (self._received[number] + new).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValidationError):
                yield _WORDS.validate_json(line)
        if not new:
            self._connections.pop(number).close()
            if number in self._go_on:
                yield _Word(number, "its command was killed, or its machine is gone", FailureKind.SILENT)

    def _say(self, word: _Word, *, except_to: int | None = None) -> None:
        for number, connection in self._connections.items():
            if number != except_to:
                with contextlib.suppress(OSError):  # it has gone, which is noticed when it is listened to
                    connection.sendall(_WORDS.dump_json(word) + b"\n")
