"""The steps by which a race is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.race.reference_steps import ReferenceSteps, take_steps, take_steps_apart
from launch.errors import UsageError
from tests.launching import run_config


def test_another_process_sees_what_this_one_does(tmp_path: Path) -> None:
    asked = [ReferenceSteps(config=run_config("single", 1, tmp_path, micro_batch_size=8), accumulation=2)]
    (here,), (apart,) = take_steps(asked), take_steps_apart(asked)
    assert here.gradient_bytes == apart.gradient_bytes > 0
    assert here.steps_of_whole == apart.steps_of_whole > 0
    assert (apart.gpu_bytes, apart.gpu_available_bytes) == (None, None)
    assert apart.rank_bytes > 100 * 2**20


def test_a_process_that_fails_is_named_in_a_line(tmp_path: Path) -> None:
    config = run_config("single", 1, tmp_path, micro_batch_size=8).model_copy(update={"task": "no-such-task"})
    with pytest.raises(UsageError, match=r"^a few steps of one process, by which the race is planned, failed: [^\n]+$"):
        take_steps_apart([ReferenceSteps(config=config, accumulation=1)])
