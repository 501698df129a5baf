"""The record of a run that did not complete, made of what it reported."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Literal

from records.config import RunConfig
from records.environment import describe_environment
from records.names import RECORD_NAME
from records.progress import ProgressReader
from records.record import EvaluationRecord, Resumption, RunRecord, StepRecord, write_record


def record_end(config: RunConfig, status: Literal["failed", "interrupted"], error: str) -> None:
    """Writes the record of a run that did not complete, with what it reported."""
    if (config.output_dir / RECORD_NAME).exists():
        return
    steps: list[StepRecord] = []
    evaluations: list[EvaluationRecord] = []
    others: dict[str, Any] = {"failed_saves": [], "warnings": []}
    for fact in ProgressReader(config.output_dir).news():
        event = fact["event"]
        if event == "resumed":
            others["resumed_from"] = Resumption.model_validate(fact["origin"])
            evaluations += [EvaluationRecord.model_validate(one) for one in fact["evaluations"]]
        if event in ("resumed", "closed"):
            steps += [StepRecord.model_validate(step) for step in fact["steps"]]
        elif event == "evaluation":
            evaluations.append(EvaluationRecord.model_validate(fact["evaluation"]))
        elif event == "save-failed":
            others["failed_saves"].append(fact["step"])
        elif event == "warning":
            others["warnings"].append(fact["text"])
        elif event == "disagreed":
            others["disagreement"] = fact["disagreement"]
    record = RunRecord(
        status=status,
        error=error,
        config=config.model_dump(mode="json"),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        task={},
        environment=describe_environment(with_torch=False),
        seconds_to_first_step=None,
        seconds=time.time() - config.started_at,
        steps=steps,
        evaluations=evaluations,
        quality={},
        ranks=[],
        restarts=config.num_restarts,
        **others,
    )
    with contextlib.suppress(OSError):  # on a full disk, what was said must do
        write_record(record, config.output_dir)
