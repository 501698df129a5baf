"""The steps by which a race is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("take", [take_steps, take_steps_apart])
@pytest.mark.parametrize(
    ("task", "why"),
    [("no-such-task", "there is no task"), ("tests.faulty:UnreadyTask", "the disk of this node is gone")],
)
def test_steps_that_fail_are_refused_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Sequence[ReferenceSteps]], Any],
    task: str,
    why: str,
) -> None:
    """On a GPU, another process takes them."""
    monkeypatch.setenv("RANK", "1")  # on which the second task fails
    config = run_config("single", 1, tmp_path, micro_batch_size=8).model_copy(update={"task": task})
    with pytest.raises(UsageError, match=rf"^a few steps of one process, .* failed: {why}[^\n]*$"):
        take([ReferenceSteps(config=config, accumulation=1)])
