"""How long an entrant of a race may take for a turn before its launcher goes on, to see whether a rank hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compare.race import live
from compare.race.live import LiveEntrant
from compare.race.messages import Turn
from launch.starters.interface import PROJECT_DIRECTORY

TINY = ["--task", "token-tagging", "--global-batch-size", "16", "--threads-per-rank", "1", "--save-every", "never"]
NUM_STEPS = 30


@pytest.fixture
def entrant(tmp_path: Path) -> Iterator[LiveEntrant]:
    options = ["single", *TINY, f"--max-steps={NUM_STEPS}", f"--output-dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    with LiveEntrant(options, num_processes=1, address=tmp_path / "socket", environment=environment) as started:
        started.get_ready()
        yield started


def test_a_turn_of_slow_steps_may_take_longer(entrant: LiveEntrant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times as long as its steps took in the turn before; of the first turn, nothing is known."""
    shortest = 0.001  # so that all steps are slow
    patience: list[float] = []
    readable = LiveEntrant._readable

    def noting(self: LiveEntrant, sockets: Any, seconds: float, **options: Any) -> Any:
        patience.append(seconds)
        return readable(self, sockets, seconds, **options)

    monkeypatch.setattr(live, "_SECONDS_OF_SILENCE", shortest)
    monkeypatch.setattr(LiveEntrant, "_readable", noting)
    (first,) = entrant.take(Turn(warm_through=1, through=5))
    (second,) = entrant.take(Turn(warm_through=6, through=15))
    entrant.take(Turn(warm_through=16, through=NUM_STEPS))
    assert entrant.end() is None
    assert len(patience) == 3
    assert patience[0] == shortest
    assert patience[1] > 3 * (first.ends[-1] - first.began) / 5 * 10
    assert patience[2] > 3 * (second.ends[-1] - second.began) / 10 * 15
