"""Makes the nodes of a job start together, at first and after each failure.

A starter that starts before the one of node 0 has ended would join what is left of the failed start, and wait there
for ranks that never come. So node 0's launcher listens on the port on which the ranks will meet, while no starter
holds it; the launchers of the other nodes report there; and when all have come, node 0 frees the port and tells them
to start their starters. A starter that still holds the port does not speak as node 0's launcher does, so a node that
comes too early tries again. The connections stay, for what the launchers have to tell each other later
(launch/other_nodes.py).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait

from pydantic import TypeAdapter

from launch.errors import UsageError, tell
from launch.nodes import Nodes
from launch.other_nodes import OtherNodes

_GREETING = b"lockstep: node 0 waits\n"
_START = b"start\n"
_FINISHED = b"finished\n"
_SECONDS_BETWEEN_TRIES = 0.2
# How long node 0's launcher may take to greet, and how long a node may take to answer.
_SECONDS_TO_SPEAK = 2.0
_MOST_BYTES = 10_000
# How long nothing may come on a connection before the system asks whether the other end is there (tcp(7)).
_SECONDS_OF_SILENCE = 60


class MeetingFailed(RuntimeError):
    """Not all nodes came in time."""


class NothingToStart(Exception):
    """Node 0 has said that the run which the nodes were to resume has finished."""


@dataclass(frozen=True)
class _Report:
    """What a node says of itself; all but `node_rank` must be what node 0 was told, if it was told anything."""

    backend: str
    num_nodes: int
    num_processes: int | None
    node_rank: int


_REPORTS = TypeAdapter(_Report)


def meet(nodes: Nodes, port: int, *, backend: str, num_processes: int, seconds: float) -> OtherNodes:
    """Returns when the launchers of all nodes have come to the port of node 0, which is then free again.

    A port is free for whoever listens with SO_REUSEADDR, as starters do, although connections to it go on (socket(7)).

    Args:
        nodes: The nodes of the job, and which one this is.
        port: The port of node 0 on which the ranks will meet.
        backend: The backend of this node's command.
        num_processes: The number of ranks on all nodes in this node's command.
        seconds: How long to wait.

    Returns:
        The launchers of the other nodes.

    Raises:
        MeetingFailed: Some node did not come in time, or node 0 cannot listen on the port.
        NothingToStart: The run that the nodes were to resume has finished (see `dismiss`).
        UsageError: Node 0 was given another command than this node, or another node has this node's number.
    """
    own = _Report(backend, nodes.num_nodes, num_processes, nodes.node_rank)
    if nodes.node_rank == 0:
        connections = _receive(own, nodes.master_addr, port, seconds, _START)
    else:
        connections = {0: _report(own, (nodes.master_addr, port), seconds)}
    for connection in connections.values():  # a firewall would forget one on which nothing is said for an hour
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS_OF_SILENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the last word must not wait
    return OtherNodes(nodes, connections)


def dismiss(nodes: Nodes, port: int, *, backend: str, seconds: float) -> None:
    """Returns when the launchers of all other nodes have come to `meet` and know that there is nothing to start.

    Args:
        nodes: The nodes of the job, of which this is node 0.
        port: The port of node 0 on which the ranks would meet.
        backend: The backend of this node's command.
        seconds: How long to wait.

    Raises:
        MeetingFailed: Some node did not come in time, or node 0 cannot listen on the port.
    """
    own = _Report(backend, nodes.num_nodes, None, nodes.node_rank)  # with however many ranks the others would start
    for connection in _receive(own, nodes.master_addr, port, seconds, _FINISHED).values():
        connection.close()


def _receive(own: _Report, address: str, port: int, seconds: float, word: bytes) -> dict[int, socket.socket]:
    """Waits, as node 0, until every other node has reported, says a word to all, and returns their connections."""
    present: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as connections:
        try:
            listener = socket.create_server((address, port), backlog=own.num_nodes)
        except OSError as error:
            raise MeetingFailed(f"node 0 cannot listen on {address}:{port} ({error.strerror})") from error
        with listener:
            while len(present) < own.num_nodes - 1:
                if (left := deadline - time.monotonic()) <= 0:
                    if word == _FINISHED:  # which needs nobody else to be true
                        _say(word, present)
                    raise _late(own, present, f"{address}:{port} within {seconds:g} s")
                readable = wait([listener, *present.values()], left)
                # A node that has reported says nothing more: it has left.
                present = {number: node for number, node in present.items() if node not in readable}
                if listener in readable:
                    node = connections.enter_context(listener.accept()[0])
                    with contextlib.suppress(OSError, ValueError):
                        _admit(own, node, present)
        # The port is free now, so whoever is told to start finds nothing there, or the starter of node 0.
        _say(word, present)
        return {number: node.dup() for number, node in present.items()}  # whoever else has come is left


def _say(word: bytes, nodes: Mapping[int, socket.socket]) -> None:
    for node in nodes.values():
        with contextlib.suppress(OSError):
            node.sendall(word)


def _admit(own: _Report, node: socket.socket, present: dict[int, socket.socket]) -> None:
    """Adds whoever has connected to the nodes that are present, or tells it why it cannot take part."""
    node.settimeout(_SECONDS_TO_SPEAK)
    node.sendall(_GREETING)
    report = _REPORTS.validate_json(node.makefile("rb").readline(_MOST_BYTES))
    if (refusal := _refusal(own, report, present)) is None:
        present[report.node_rank] = node
    else:
        tell(f"node {report.node_rank} was refused: {refusal}")
        node.sendall(refusal.encode() + b"\n")
        node.shutdown(socket.SHUT_WR)


def _late(own: _Report, present: Collection[int], where: str) -> MeetingFailed:
    missing = [str(number) for number in range(1, own.num_nodes) if number not in present]
    return MeetingFailed(
        f"node{'s' * (len(missing) > 1)} {', '.join(missing)} did not come to {where}; is the command running there?"
    )


def _refusal(own: _Report, report: _Report, present: Collection[int]) -> str | None:
    """Says why a node cannot take part; None if it can."""
    for name, value in asdict(report).items():
        if name != "node_rank" and getattr(own, name) not in (None, value):
            option = "the backend" if name == "backend" else f"--{name.replace('_', '-')}"
            return (
                f"{option} is {value} on node {report.node_rank} and {getattr(own, name)} on node 0; give both the same"
            )
    if report.node_rank in present or not 0 < report.node_rank < own.num_nodes:
        return f"--node-rank {report.node_rank}: another node has this number; give each node its own"
    return None


def _report(own: _Report, where: tuple[str, int], seconds: float) -> socket.socket:
    """Reports to node 0, waits until it says that all are there, and returns the connection to it."""
    deadline = time.monotonic() + seconds
    reason = "nothing listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as kept:
                connection = socket.create_connection(where, timeout=min(left, _SECONDS_TO_SPEAK))
                kept.enter_context(connection)
                # Without a buffer, which would swallow what node 0 says after its answer.
                answers = kept.enter_context(connection.makefile("rb", buffering=0))
                if answers.readline(_MOST_BYTES) == _GREETING:
                    connection.sendall(_REPORTS.dump_json(own) + b"\n")
                    connection.settimeout(max(deadline - time.monotonic(), _SECONDS_TO_SPEAK))
                    answer = answers.readline(_MOST_BYTES)
                    if answer == _START:
                        answers.close()
                        kept.pop_all()
                        return connection
                    if answer == _FINISHED:
                        raise NothingToStart
                    if answer:
                        raise UsageError(answer.decode(errors="replace").strip())
                reason = "an earlier start has not ended there"
        except TimeoutError:
            reason = "not all nodes came"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_SECONDS_BETWEEN_TRIES)
    raise MeetingFailed(
        f"node 0 did not start at {where[0]}:{where[1]} within {seconds:g} s ({reason}); is its command running?"
    )
