"""The steps by which a race is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compare.networks import RaceNetwork
from compare.race import costs
from compare.race.costs import Costs, measure_costs
from compare.race.plan import Entrant, reference_of, yardstick_of
from compare.race.reference_steps import ReferenceSteps, StepsSeen, take_steps, take_steps_apart
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


def _ranks(num_processes: int, accumulation: int) -> Entrant:
    return Entrant(
        backend="ddp", num_processes=num_processes, precision="fp32", accumulation=accumulation, global_batch_size=32
    )


def _measured(
    entrants: Sequence[Entrant], place: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Costs, list[ReferenceSteps]]:
    """What a race would measure, if each step took as many seconds as it has micro-batches; and what it asks for."""
    asked: list[ReferenceSteps] = []

    def take(steps: Sequence[ReferenceSteps]) -> list[StepsSeen]:
        asked.extend(steps)
        return [
            StepsSeen(
                step_seconds=one.accumulation,
                evaluation_seconds=1.0,
                steps_of_whole=10,
                gradient_bytes=0,
                rank_bytes=1,
                gpu_bytes=None,
                gpu_available_bytes=None,
            )
            for one in steps
        ]

    monkeypatch.setattr(costs, "take_steps", take)
    monkeypatch.setattr(costs, "_import_seconds", lambda: 1.0)
    configs = {
        who: run_config("ddp", who.num_processes, place, micro_batch_size=who.micro_batch_size) for who in entrants
    }
    return measure_costs(configs, RaceNetwork()), asked


def test_no_larger_micro_batch_is_tried_than_entrants_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entrants = [_ranks(4, 1), _ranks(2, 1), _ranks(4, 2)]
    found, asked = _measured(entrants, tmp_path, monkeypatch)
    assert [(one.config.num_processes, one.accumulation) for one in asked] == [(4, 2), (4, 8)]
    assert found.step_seconds == {"fp32, 1, 32": 2.0, "fp32, 2, 32": 8.0}


def test_a_whole_batch_is_tried_where_one_process_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = _measured([_ranks(2, 1), _ranks(1, 1)], tmp_path, monkeypatch)
    assert [(one.config.num_processes, one.accumulation) for one in asked] == [(2, 1)]


def test_the_reference_takes_about_as_long_as_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it, nothing was measured: no entrant computes the whole batch at once."""
    who = _ranks(2, 4)
    found, _ = _measured([who, _ranks(2, 8)], tmp_path, monkeypatch)
    assert found.step(reference_of(who)) == found.step(yardstick_of(_ranks(2, 1))) == 8.0


def test_one_process_instead_of_ranks_has_all_cores_or_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _ranks(1, 1).model_copy(update={"backend": "single", "role": "alternative"})
    found, _ = _measured([whole], tmp_path, monkeypatch)
    on_cpu = found.model_copy(update={"num_cpus": 4})
    assert on_cpu.step(whole) < 0.5 * found.step_seconds["fp32, 1, 32"]
    assert on_cpu.model_copy(update={"gpu_rank_bytes": 1}).step(whole) == found.step_seconds["fp32, 1, 32"]
