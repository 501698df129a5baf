"""How the launchers of several nodes wait for each other before they start their starters."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from launch.errors import UsageError
from launch.finished import tell_other_nodes
from launch.meeting import MeetingFailed, NothingToStart, dismiss, meet
from launch.nodes import Nodes
from launch.other_nodes import OtherNodes
from tests.launching import free_port
from watch.failures import FailureKind, JobFailure

GREETING = b"lockstep: node 0 waits\n"


@pytest.fixture
def port() -> int:
    return int(free_port())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def _meet(port: int, node_rank: int, *, num_nodes: int = 2, backend: str = "ddp", seconds: float = 20) -> OtherNodes:
    return meet(Nodes(num_nodes, node_rank), port, backend=backend, num_processes=2 * num_nodes, seconds=seconds)


def _come(port: int, node_rank: int, **options: Any) -> None:
    with _meet(port, node_rank, **options):
        pass


def _others_wait(*others: Future[Any]) -> bool:
    time.sleep(0.5)
    return not any(other.done() for other in others)


def test_all_start_when_the_last_one_has_come(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(_meet, port, 0, num_nodes=3)
    third = threads.submit(_meet, port, 2, num_nodes=3)
    assert _others_wait(first, third)
    with _meet(port, 1, num_nodes=3) as of_second, first.result(5) as of_first, third.result(5) as of_third:
        with socket.socket() as starter:  # the port is free
            starter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            starter.bind(("127.0.0.1", port))
            starter.listen()
        assert not of_first.have_failed()
        # What one tells reaches all, through node 0.
        of_second.tell(JobFailure(FailureKind.SILENT, 1, "ended", None))
        assert str(of_first.failure(5)) == str(of_third.failure(5)) == "node 1: rank 1: ended"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"start\n"])
def test_what_is_left_of_an_earlier_start_is_not_node_0(port: int, threads: ThreadPoolExecutor, answer: bytes) -> None:
    with socket.socket() as starter:
        starter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        starter.bind(("127.0.0.1", port))
        starter.listen()
        second = threads.submit(_come, port, 1)
        connection, _ = starter.accept()
        with connection:
            connection.sendall(answer)
            assert _others_wait(second)
    _come(port, 0)
    second.result(5)


def _report(port: int, **changes: object) -> socket.socket:
    """Comes as a node does, and stays; the caller may leave."""
    deadline = time.monotonic() + 20
    while True:
        try:
            node = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            break
    report = {"backend": "ddp", "num_nodes": 2, "num_processes": 4, "node_rank": 1} | changes
    node.sendall(json.dumps(report).encode() + b"\n")
    assert node.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
    return node


def test_a_node_that_leaves_is_awaited_again(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(_come, port, 0, num_nodes=3)
    with _report(port, num_nodes=3, num_processes=6, node_rank=1):
        assert _others_wait(first)
    third = threads.submit(_come, port, 2, num_nodes=3)
    assert _others_wait(first, third)
    _come(port, 1, num_nodes=3)
    first.result(5), third.result(5)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"num_nodes": 3}, "--num-nodes is 3 on node 1 and 2 on node 0; give both the same"),
        ({"num_processes": 8}, "--num-processes is 8 on node 1 and 4 on node 0; give both the same"),
        ({"backend": "horovod"}, "the backend is horovod on node 1 and ddp on node 0; give both the same"),
        ({"node_rank": 0}, "--node-rank 0: another node has this number; give each node its own"),
    ],
)
def test_a_node_of_another_job_is_refused(
    port: int,
    threads: ThreadPoolExecutor,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    refusal: str,
) -> None:
    first = threads.submit(_come, port, 0)
    with _report(port, **changes) as node:
        assert node.recv(1000).decode() == refusal + "\n"
    assert f"was refused: {refusal}" in capsys.readouterr().err
    assert _others_wait(first)
    _come(port, 1)
    first.result(5)


def test_the_second_node_of_a_number_is_told_so(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(_come, port, 0, num_nodes=3)
    with _report(port, num_nodes=3, num_processes=6):
        with pytest.raises(UsageError, match="--node-rank 1: another node has this number"):
            _come(port, 1, num_nodes=3)
        _come(port, 2, num_nodes=3)
        first.result(5)


def test_what_is_no_node_is_not_counted(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(_come, port, 0, seconds=6)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"node_rank": 1}\n', b"\xff" * 20_000):
        with _report(port, node_rank=7), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            assert _others_wait(first)
    with pytest.raises(MeetingFailed, match=r"node 1 did not come to 127.0.0.1:\d+ within 6 s; is the command running"):
        first.result(20)


def test_nodes_of_a_run_that_has_finished_do_not_start(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(dismiss, Nodes(3, 0), port, backend="ddp", seconds=20)
    second = threads.submit(_come, port, 1, num_nodes=3)
    assert _others_wait(first, second)
    with pytest.raises(NothingToStart):
        _come(port, 2, num_nodes=3)
    with pytest.raises(NothingToStart):
        second.result(5)
    first.result(5)
    with pytest.raises(MeetingFailed, match=r"node 1 did not come to 127\.0\.0\.1:\d+ within 0\.5 s"):
        dismiss(Nodes(2, 0), port, backend="ddp", seconds=0.5)


def test_a_node_that_does_not_come_keeps_nobody_from_knowing(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(dismiss, Nodes(3, 0), port, backend="ddp", seconds=2)
    with pytest.raises(NothingToStart):
        _come(port, 1, num_nodes=3)
    with pytest.raises(MeetingFailed, match="node 2 did not come to"):
        first.result(5)


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("--num-nodes 2 --master-addr 127.0.0.1 --master-port 20001 --hidden-size 16", True),
        ("--num-nodes 2 --master-addr 127.0.0.1 --node-rank 1", False),
        ("--num-nodes 2 --master-addr 127.0.0.1 --dry-run", False),
        ("--num-nodes 2 --master-addr 127.0.0.1 --min-nodes 1", False),
        ("--num-nodes 2", False),
        ("--num-processes 2", False),
    ],
)
def test_who_tells_the_others_that_a_run_has_finished(
    monkeypatch: pytest.MonkeyPatch, words: str, is_told: bool
) -> None:
    told: list[tuple[Nodes, int]] = []
    monkeypatch.setattr("launch.finished.dismiss", lambda nodes, port, **_: told.append((nodes, port)))
    tell_other_nodes("ddp", ["--resume", *words.split()])
    assert told == ([(Nodes(2, 0), 20001)] if is_told else [])


def test_node_0_does_not_come(port: int) -> None:
    with pytest.raises(MeetingFailed, match=r"node 0 did not start at \S+ within 0.5 s \(Connection refused\)"):
        _come(port, 1, seconds=0.5)


def test_node_0_cannot_listen(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(MeetingFailed, match="node 0 cannot listen on"):
        _come(port, 0)
