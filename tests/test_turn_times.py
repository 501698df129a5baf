"""What the seconds of a turn are: those of its timed steps, without the rest before them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from compare.race.heat import of_a_step
from compare.race.messages import Hello, Listener, Turn, TurnTaken, received, send
from compare.race.turns import Turns
from compare.report.runs import TurnFacts
from training.clock import ProcessorClock
from training.measurements import Measurements
from watch.heartbeat import Heartbeat


def test_a_turn_of_one_step_has_the_time_of_that_step_alone(tmp_path: Path) -> None:
    """A rank is given steps 2 and 3, of which the second is timed, and then step 4, before which it rests."""
    listener = Listener(tmp_path / "socket", 1)
    turns = Turns(listener.address, Hello(0, os.getpid(), 4), Measurements(Heartbeat(), ProcessorClock()), on_gpu=False)
    connection = listener.accept()
    assert connection is not None
    lines = connection.makefile("rb")
    received(Hello, lines.readline())
    send(connection, Turn(warm_through=2, through=3))
    turns.on_epoch_begin()
    turns.on_step_end(2)
    resting = threading.Thread(target=turns.on_step_end, args=(3,))
    resting.start()
    assert len(received(TurnTaken, lines.readline()).ends) == 1
    time.sleep(0.3)
    began = time.monotonic()
    send(connection, Turn(warm_through=3, through=4))
    resting.join()
    send(connection, Turn(warm_through=5, through=6))  # or the rank would wait for ever
    turns.on_step_end(4)
    taken = received(TurnTaken, lines.readline())
    assert began <= taken.began <= taken.ends[-1] <= time.monotonic()
    assert len(taken.ends) == 1


def test_a_step_on_a_gpu_is_a_part_of_what_is_timed() -> None:
    turn = {"round": 0, "position": 0, "first_step": 2, "num_steps": 4, "cpu_seconds": 0.0, "foreign_share": 0.0}
    on_cpu, on_gpu = (
        TurnFacts(**turn, instructions=None, step_seconds=seconds)  # type: ignore[arg-type]
        for seconds in ([0.013, 0.01, 0.011, 0.3], [0.048])
    )
    assert of_a_step(on_cpu) == pytest.approx(0.01)
    assert of_a_step(on_gpu) == pytest.approx(0.012)
