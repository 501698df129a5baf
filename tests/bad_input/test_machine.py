"""What the machine does not allow: a port that is taken, a cache that cannot be written."""

from __future__ import annotations

import shlex
import socket

from tests.bad_input.files import train_on
from tests.bad_input.place import LOCKSTEP, Place, run


def test_busy_port(place: Place) -> None:
    with socket.socket() as other, place.untouched():
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = run(place, LOCKSTEP, "ddp", "--master-port", str(port))
        outcome.assert_refused(f"--master-port {port}", "not free", "choose another")


def test_cache_that_cannot_be_written(place: Place) -> None:
    with place.untouched():
        outcome = run(place, LOCKSTEP, *shlex.split(train_on("rows.csv")), LOCKSTEP_CACHE=str(place.work / "rows.csv"))
        outcome.assert_refused("rows.csv", "cannot be written", "set LOCKSTEP_CACHE")
