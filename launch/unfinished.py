"""The record of a run that did not complete, from the news that it wrote."""

from __future__ import annotations

import contextlib
import time
from typing import Literal

from records.config import RunConfig
from records.environment import describe_environment
from records.names import RECORD_NAME
from records.news import Disagreed, Evaluated, LossesRead, News, Resumed, SaveFailed, Warned
from records.progress import ProgressReader
from records.record import RunRecord, write_record


def record_end(config: RunConfig, status: Literal["failed", "interrupted"], error: str) -> None:
    """Writes the record of a run that did not complete, with what it reported."""
    if (config.output_dir / RECORD_NAME).exists():
        return
    record = RunRecord(
        status=status,
        error=error,
        config=config,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        task={},
        environment=describe_environment(with_torch=False),
        seconds_to_first_step=None,
        seconds=time.time() - config.started_at,
        steps=[],
        evaluations=[],
        quality={},
        ranks=[],
        restarts=config.num_restarts,
    )
    for news in ProgressReader(config.output_dir).news():
        _add_to_record(record, news)
    with contextlib.suppress(OSError):  # on a full disk there is no record, only the message
        write_record(record, config.output_dir)


def _add_to_record(record: RunRecord, news: News) -> None:
    match news:
        case Resumed():
            record.resumed_from = news.origin
            record.steps, record.evaluations, record.worlds = news.steps, news.evaluations, news.worlds
        case LossesRead():
            record.steps = [one for one in record.steps if one.step < news.steps[0].step] + news.steps
        case Evaluated(evaluation=evaluation):
            record.evaluations = [one for one in record.evaluations if one.step < evaluation.step] + [evaluation]
        case SaveFailed():
            record.failed_saves.append(news.step)
        case Warned():
            record.warnings.append(news.text)
        case Disagreed():
            record.disagreement = news.disagreement
