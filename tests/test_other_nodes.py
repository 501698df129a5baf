"""What the launchers of several nodes tell each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from backends.capabilities import TORCH_SIGNS
from launch.job import Job
from launch.nodes import Nodes
from launch.other_nodes import OtherNodes
from launch.signals import Interrupted
from launch.supervisor import _agreed, _Course
from watch.failures import FailureKind, JobFailure

SILENT = JobFailure(FailureKind.SILENT, 5, "ended without a message", None)
CONSEQUENCE = JobFailure(FailureKind.ERROR, 0, "Connection closed by peer", None, may_lie_elsewhere=True)


@pytest.fixture
def sockets() -> Iterator[dict[int, tuple[socket.socket, socket.socket]]]:
    """For each node but node 0, the ends of its connection: node 0's, and its own."""
    pairs = {number: socket.socketpair() for number in (1, 2)}
    yield pairs
    for pair in pairs.values():
        for one in pair:
            one.close()


@pytest.fixture
def nodes(sockets: dict[int, tuple[socket.socket, socket.socket]]) -> list[OtherNodes]:
    """For each of three nodes, the others as it sees them."""
    first = OtherNodes(Nodes(3, 0), {number: pair[0] for number, pair in sockets.items()})
    return [first, *(OtherNodes(Nodes(3, number), {0: pair[1]}) for number, pair in sockets.items())]


def test_a_failure_is_told_to_all(nodes: list[OtherNodes]) -> None:
    assert not any(node.have_failed() for node in nodes)
    nodes[1].tell(SILENT)
    assert nodes[0].have_failed()
    assert nodes[2].have_failed()
    for node in (nodes[0], nodes[2]):
        found = node.failure(5)
        assert found is not None
        assert (str(found), found.kind) == ("node 1: rank 5: ended without a message", FailureKind.SILENT)
    assert nodes[1].failure(0) is None


def test_the_cause_counts_and_not_what_was_told_first(nodes: list[OtherNodes]) -> None:
    nodes[1].tell(CONSEQUENCE, is_cause=False)
    assert nodes[0].have_failed()
    elsewhere = "node 1: rank 0: Connection closed by peer (the cause may lie on another node)"
    assert str(nodes[0].failure(0.1)) == elsewhere
    nodes[2].tell(SILENT)
    assert str(nodes[0].failure(5)) == "node 2: rank 5: ended without a message"


def test_nobody_waits_for_nodes_that_all_know_no_cause(nodes: list[OtherNodes]) -> None:
    for node in (nodes[2], nodes[1], nodes[0]):
        node.tell(CONSEQUENCE, is_cause=False)
    began = time.monotonic()
    for node in nodes:
        assert "may lie on another node" in str(node.failure(60))
    assert time.monotonic() - began < 30


def test_who_has_succeeded_may_go(nodes: list[OtherNodes]) -> None:
    nodes[1].tell(None)
    with nodes[2]:
        nodes[2].tell(None)
    assert not nodes[0].have_failed()
    assert nodes[0].failure(60) is None  # nobody is left to wait for
    nodes[0].tell(None)
    assert not nodes[1].have_failed()


def test_who_goes_without_a_word_has_failed(
    nodes: list[OtherNodes], sockets: dict[int, tuple[socket.socket, socket.socket]]
) -> None:
    sockets[2][1].close()
    assert nodes[0].have_failed()
    assert str(nodes[1].failure(5)) == "node 2: its command was killed, or its machine is gone"


def test_who_is_interrupted_says_so(nodes: list[OtherNodes]) -> None:
    with pytest.raises(Interrupted), nodes[1]:
        raise Interrupted(15)
    assert str(nodes[0].failure(5)) == "node 1: its command was interrupted by SIGTERM"


def test_an_error_of_a_launcher_is_told_whatever_it_quotes(nodes: list[OtherNodes]) -> None:
    with pytest.raises(OSError, match="full"), nodes[1]:
        raise OSError("the disk is full:\n\ud800")
    assert str(nodes[0].failure(5)) == "node 1: the disk is full: ?"


def test_words_come_in_pieces_and_several_at_once(
    nodes: list[OtherNodes], sockets: dict[int, tuple[socket.socket, socket.socket]]
) -> None:
    first, own = sockets[1]
    nodes[1].tell(SILENT)
    whole = first.recv(10_000)
    first.setblocking(True)
    own.sendall(whole[:7])
    assert not nodes[0].have_failed()
    own.sendall(whole[7:] + b"no word\n" + whole[:3])
    assert nodes[0].have_failed()
    assert nodes[2].have_failed()


def _course(*, is_told: bool) -> _Course:
    job = Job([], {}, Path(), 2, None, TORCH_SIGNS)
    return _Course(job, Mock(), None, is_told=is_told)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_failure_that_began_here_is_told_as_the_cause(nodes: list[OtherNodes], is_told: bool) -> None:
    """Also after another node has told that it has lost this one."""
    nodes[1].tell(CONSEQUENCE, is_cause=False)
    assert nodes[0].have_failed()
    assert _agreed(SILENT, _course(is_told=is_told), nodes[0]) is SILENT
    assert str(nodes[2].failure(5)) == "node 0: rank 5: ended without a message"


def test_a_failure_elsewhere_is_what_the_job_fails_of(nodes: list[OtherNodes]) -> None:
    nodes[2].tell(SILENT)
    for failure, is_told in ((CONSEQUENCE, False), (CONSEQUENCE, True)):
        found = _agreed(failure, _course(is_told=is_told), nodes[0])
        assert str(found) == "node 2: rank 5: ended without a message"
    # An error that only another node's end has caused, though nobody can tell from its text.
    error = JobFailure(FailureKind.ERROR, 0, "KeyError: 7", None)
    assert nodes[1].have_failed()
    assert str(_agreed(error, _course(is_told=True), nodes[1])) == "node 2: rank 5: ended without a message"


def test_without_a_cause_the_job_fails_of_what_was_seen_here(nodes: list[OtherNodes]) -> None:
    for node in (nodes[1], nodes[2]):
        node.tell(CONSEQUENCE, is_cause=False)
    assert _agreed(CONSEQUENCE, _course(is_told=False), nodes[0]) is CONSEQUENCE
    assert str(_agreed(CONSEQUENCE, _course(is_told=True), nodes[0])).startswith("node 1: rank 0: Connection closed")
    assert _agreed(None, _course(is_told=True), nodes[0]) is None
