"""News are read as they were written; lines that cannot be read are passed over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from records.names import PROGRESS_NAME
from records.news import Evaluated, LossesRead, StepEnded, Warned
from records.progress import ProgressLog, ProgressReader
from records.record import EvaluationRecord, StepRecord

STEP = StepRecord(step=1, epoch=0, num_samples=32, loss=0.1 + 0.2, grad_norm=None, learning_rate=5e-324, skipped=False)
NEWS = [
    LossesRead(steps=[STEP]),
    Evaluated(evaluation=EvaluationRecord(step=1, epoch=0, seconds=0.5, metrics={"accuracy": 1 / 3, "f1": None})),
    Warned(text="größer\nals vorher"),
]


def test_news_come_back_as_they_were(tmp_path: Path) -> None:
    log, reader = ProgressLog(tmp_path, rank=0), ProgressReader(tmp_path)
    for item in NEWS:
        log.write(item)
        assert reader.news() == [item]
    assert reader.news() == []
    assert ProgressReader(tmp_path).news() == NEWS


def test_ranks_other_than_0_write_nothing(tmp_path: Path) -> None:
    ProgressLog(tmp_path, rank=1).write(NEWS[0])
    assert ProgressReader(tmp_path).news() == []


@pytest.mark.parametrize(
    "line",
    ["", "7", "{}", '{"event":"closed","ste', '{"event":"closed"}{"event":"x"}', '{"event":"of a later version"}'],
)
def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path, line: str) -> None:
    """As where a full disk has cut it, and the next one was appended to it."""
    log = ProgressLog(tmp_path, rank=0)
    log.write(NEWS[0])
    with (tmp_path / PROGRESS_NAME).open("a") as file:
        file.write(f"{line}\n")
    log.write(NEWS[1])
    assert ProgressReader(tmp_path).news() == NEWS[:2]


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    reader, content = ProgressReader(tmp_path), NEWS[2].model_dump_json()
    (tmp_path / PROGRESS_NAME).write_text(content)
    assert reader.news() == []
    with (tmp_path / PROGRESS_NAME).open("a") as file:
        file.write("\n")
    assert reader.news() == [NEWS[2]]


def test_steps_are_reported_now_and_then(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path, rank=0)
    for step in range(1, 4):
        log.beat(step, 3, None)
    (first,) = ProgressReader(tmp_path).news()
    assert first == StepEnded(step=1, num_steps=3, loss=None, time=first.time)


def test_a_number_that_is_not_finite_is_no_news() -> None:
    with pytest.raises(ValidationError):
        StepEnded(step=1, num_steps=1, loss=math.nan)
