"""What training to the end leads to: curves, and the table in the form of published comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compare.numbers import significant
from compare.report.grouping import EntrantRuns
from compare.report.tables import standing
from compare.report.words import describe_batch, machine_of, ranks
from compare.results import Curve, GroupResult, SeedRow
from records.record import RunRecord
from records.throughput import slowest_rank


def curves_of(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]], target: float) -> list[Curve]:
    """Returns the curve of each entrant that trained to the end, or that was evaluated more than once.

    Args:
        groups: The groups.
        grouped: The runs of each group.
        target: The accuracy whose time is reported.
    """
    curves = []
    for result, runs in zip(groups, grouped, strict=True):
        for entrant in runs:
            evaluated = [run.record for run in entrant.timed[:1] if len(run.record.evaluations) > 1]
            if entrant.whole is not None and entrant.whole.record.evaluations:
                evaluated.append(entrant.whole.record)
            if evaluated:
                longest = max(evaluated, key=lambda record: len(record.steps))
                curves.append(_curve(result.group.key, entrant.name, longest, target))
    return curves


def _curve(key: str, name: str, record: RunRecord, target: float) -> Curve:
    seconds = np.cumsum(slowest_rank(record).step_seconds).tolist()
    evaluations = record.evaluations
    metrics = {metric: [one.metrics[metric] for one in evaluations] for metric in evaluations[0].metrics}
    at_evaluations = [seconds[one.step - 1] for one in evaluations]
    reached = [
        second
        for second, accuracy in zip(at_evaluations, metrics.get("accuracy", []), strict=False)
        if accuracy is not None and accuracy >= target
    ]
    return Curve(
        group=key,
        backend=name,
        steps=[step.step for step in record.steps],
        losses=[None if step.loss is None else significant(step.loss) for step in record.steps],
        seconds=[significant(second) for second in seconds],
        evaluation_steps=[one.step for one in evaluations],
        evaluation_seconds=at_evaluations,
        metrics=metrics,
        target=target if "accuracy" in metrics else None,
        seconds_to_target=reached[0] if reached else None,
        total_seconds=record.seconds,
        positive_label=record.task.get("positive_label"),
    )


def seed_table_of(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[SeedRow]:
    """Returns a row for each entrant that trained to the end."""
    rows = []
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            if own.whole is None:
                continue
            record = own.whole.record
            why = standing(entrant)
            world = f"{ranks(record.config.num_processes)}, {record.config.precision}"
            rows.append(
                SeedRow(
                    hardware=result.group.machine or machine_of(record),
                    backend=f"{own.name}, {world}" + (f" ({why})" if why else ""),
                    train_seconds=sum(slowest_rank(record).step_seconds),
                    f1=record.quality.get("f1"),
                    macro_f1=record.quality.get("macro_f1"),
                    roc_auc=record.quality.get("roc_auc"),
                    accuracy=record.quality.get("accuracy"),
                    batch_size=describe_batch(record),
                    positive_label=record.task.get("positive_label"),
                )
            )
    return rows
