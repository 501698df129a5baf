"""What a race, its ranks and the keepers of their nodes tell each other."""

from __future__ import annotations

import socket

import pytest

from compare.race.live import on_one_clock, step_seconds_of
from compare.race.messages import Hello, Listener, Rested, TurnTaken, connect, received, send
from compare.race.process_tree import foreign_share_of


def test_machines_whose_clocks_differ_end_their_steps_together() -> None:
    first = TurnTaken(100.0, [100.1, 100.3, 100.4], 0.4, None)
    other = TurnTaken(7.02, [7.1, 7.301, 7.4], 0.4, None)  # waits less in the first step, which it begins later
    assert step_seconds_of(on_one_clock([first, other])) == pytest.approx([0.0805, 0.2005, 0.0995])


def test_what_other_programs_take_is_that_of_the_busiest_machine() -> None:
    """Nodes that share a machine are no strangers to each other."""
    shared = [Rested("a", 0.9, 0.4), Rested("a", 0.92, 0.45)]
    assert foreign_share_of(shared) == pytest.approx(0.06)
    assert foreign_share_of([*shared, Rested("b", 0.7, 0.5)]) == pytest.approx(0.2)
    assert foreign_share_of([Rested("a", 0.5, 0.501)]) == pytest.approx(-0.001)


def test_the_race_itself_is_no_other_program_on_the_machine_of_a_node() -> None:
    nodes = [Rested("a", 0.62, 0.5), Rested("b", 0.53, 0.5)]
    assert foreign_share_of(nodes, race=Rested("a", 0.62, 0.1)) == pytest.approx(0.03)
    assert foreign_share_of(nodes, race=Rested("c", 0.9, 0.0)) == pytest.approx(0.12)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"0" * 32 + b"\n", b"0" * 500])
def test_a_stranger_does_not_take_part(said: bytes) -> None:
    listener = Listener("127.0.0.1", 2)
    with listener.socket:
        _, host, port, _ = listener.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert listener.accept() is None
        with connect(listener.address) as rank:
            send(rank, hello := Hello(1, 4711, 12, "n1"))
            connection = listener.accept()
            assert connection is not None
            with connection, connection.makefile("rb") as lines:
                assert received(Hello, lines.readline()) == hello
