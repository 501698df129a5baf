"""How much more slowly cores compute when several of them do."""

from __future__ import annotations

import pytest

from compare.race import core_clock
from records.environment import num_cpus


@pytest.mark.slow
@pytest.mark.skipif(num_cpus() < 2, reason="one core has no others beside it")
def test_it_is_measured_in_processes_of_its_own() -> None:
    measured = core_clock.measure_apart(2)
    assert measured is not None
    assert 0.5 < measured < 10


@pytest.mark.parametrize("num_processes", [1, 1_000_000])
def test_one_process_or_more_than_there_are_cores_are_not_measured(num_processes: int) -> None:
    assert core_clock.measure_apart(num_processes) is None
