"""From runs to results: runs are grouped, measured, compared and judged."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import combinations
from typing import Any

from compare.report.entrants import measure_entrant
from compare.report.grouping import EntrantRuns, condition, group_runs
from compare.report.info import NothingToReport, ReportInfo
from compare.report.places import mixtures_of, places_of
from compare.report.references import entrant_parity, sample_of
from compare.report.runs import Run
from compare.report.scaling import scaling_of
from compare.report.statistics import CONFIDENCE, SMALLEST_CLAIM, PairedStarts, compare_group, log_ratio
from compare.report.training import curves_of, seed_table_of
from compare.report.words import describe_batch, describe_task, describe_verdict, ranks
from compare.results import CollectiveSeries, Comparison, Group, GroupResult, Results
from records.record import RunRecord
from records.throughput import NUM_WARMUP_STEPS


def analyse(runs: Sequence[Run], collectives: Sequence[CollectiveSeries], info: ReportInfo) -> Results:
    """Compares runs.

    Args:
        runs: The runs.
        collectives: What the benchmark of collectives measured.
        info: What else the report says.

    Raises:
        NothingToReport: No timed run completed.
    """
    grouped = sorted(group_runs(runs), key=_order)
    if not grouped:
        raise NothingToReport("no timed run completed, so there is nothing to report")
    completed = [run for run in runs if run.is_usable]
    keys = _keys(grouped)
    groups = [_group_result(key, entrants, completed) for key, entrants in zip(keys, grouped, strict=True)]
    failures = [
        f"{run.record.config.backend} {'is left out' if run.record.status == 'completed' else 'failed'}: "
        f"{run.why_unusable} ({run.name})"
        for run in runs
        if not run.is_usable
    ]
    problems = [*info.problems, *failures, *mixtures_of(completed)]
    return Results(
        title=info.title,
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        verdict=describe_verdict(groups, len(problems)),
        groups=groups,
        curves=curves_of(groups, grouped, info.target_accuracy),
        seed_table=seed_table_of(groups, grouped),
        scaling=scaling_of(groups, grouped),
        collectives=list(collectives),
        places=places_of(completed),
        problems=problems,
        commands=dict(info.commands),
        facts={
            **info.facts,
            "warm-up steps left out of every run": NUM_WARMUP_STEPS,
            "confidence of all intervals of differences of one group together": CONFIDENCE,
            "differences never claimed, up to": SMALLEST_CLAIM,
        },
    )


def _order(entrants: list[EntrantRuns]) -> tuple[Any, ...]:
    record = sample_of(entrants).record
    config = record.config
    return (-config.num_processes, config.precision != "fp32", record.gradient_accumulation_steps,
            config.global_batch_size, config.precision, config.started_at)  # fmt: skip


def _keys(grouped: Sequence[list[EntrantRuns]]) -> list[str]:
    """Names groups; groups that would have the same name also say in what they differ."""
    samples = [sample_of(entrants).record for entrants in grouped]
    keys = [_key(sample) for sample in samples]
    for key in {key for key in keys if keys.count(key) > 1}:
        places = [index for index, other in enumerate(keys) if other == key]
        conditions = [condition(samples[index]) for index in places]
        names = [name for name in conditions[0] if len({repr(one.get(name)) for one in conditions}) > 1]
        for index, one in zip(places, conditions, strict=True):
            keys[index] = f"{key}; " + ", ".join(
                f"{name.replace('_', ' ')} {str(one.get(name))[:60]}" for name in names
            )
    return keys


def _key(sample: RunRecord) -> str:
    config = sample.config
    device = "" if config.device == "cpu" else f" on {config.device}"
    return f"{ranks(config.num_processes)}{device}, {config.precision}, batch {describe_batch(sample)}"


def _group_result(key: str, runs: list[EntrantRuns], completed: Sequence[Run]) -> GroupResult:
    entrants = [measure_entrant(entrant, entrant_parity(entrant, runs, completed)) for entrant in runs]
    sample = sample_of(runs).record
    config = sample.config
    group = Group(
        task=describe_task(sample),
        device=config.device,
        num_processes=config.num_processes,
        precision=config.precision,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=sample.gradient_accumulation_steps,
        seed=config.seed,
        key=key,
    )
    ranked = [runs[index] for index, entrant in enumerate(entrants) if entrant.ranked]
    comparisons = _comparisons(ranked)
    names = {name: None for entrant in entrants for name in entrant.settings}
    measured = [entrant for entrant in entrants if entrant.num_runs]
    differing = [name for name in names if len({entrant.settings.get(name) for entrant in measured}) > 1]
    return GroupResult(group=group, entrants=entrants, comparisons=comparisons, differing_settings=differing)


def _comparisons(ranked: Sequence[EntrantRuns]) -> list[Comparison]:
    """Pairs turns of the same round of a block; runs outside a race are paired in the order in which they were made."""
    pairs, outside = [], set()
    for first, second in combinations(ranked, 2):
        ours, theirs = _by_block(first.timed), _by_block(second.timed)
        blocks = [block for block in ours if block in theirs]
        starts = [
            [log_ratio(ours[block][steps], theirs[block][steps]) for steps in ours[block] if steps in theirs[block]]
            for block in blocks
        ]
        pairs.append(PairedStarts(first.name, second.name, [turns for turns in starts if turns]))
        if any(not race for race, _ in blocks):
            outside.add((first.name, second.name))
    return [
        comparison.model_copy(update={"text": f"{comparison.text} (the runs were not made in blocks)"})
        if (comparison.first, comparison.second) in outside
        else comparison
        for comparison in compare_group(pairs)
    ]


def _by_block(runs: Sequence[Run]) -> dict[tuple[str, int], dict[tuple[int, int], list[float]]]:
    """Returns the seconds of each step, by the run's race and block, and by the steps that were timed together.

    Outside a race, the block is the number of the run, and all of its steps have one time together.
    """
    found = {}
    for number, run in enumerate(runs):
        most = max((span.number for span in run.timed_steps), default=0)
        block = (run.race.race, run.race.block) if run.race else ("", number)
        found[block] = {(span.first, span.number): span.seconds for span in run.timed_steps if 2 * span.number >= most}
    return found
