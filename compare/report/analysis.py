"""From runs to results: runs are grouped, measured, compared and judged."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import combinations

from compare.report.bare import adapter_costs_of, without_bare
from compare.report.counted import counted, without_peers
from compare.report.energy import describe_energy
from compare.report.entrants import measure_entrant
from compare.report.grouping import EntrantRuns, condition
from compare.report.headings import keys_of
from compare.report.info import NothingToReport, ReportInfo
from compare.report.long_steps import shares_of_long_steps
from compare.report.machines import placed, several_machines
from compare.report.pairing import paired
from compare.report.peer_tables import describe_peers
from compare.report.peers import peers_of
from compare.report.places import idleness_of, mixtures_of, places_of
from compare.report.references import entrant_parity, sample_of
from compare.report.runs import Run
from compare.report.scaling import scaling_of
from compare.report.standings import standings_of
from compare.report.statistics import CONFIDENCE, compare_group
from compare.report.training import curves_of, seed_table_of
from compare.report.verdict import describe_verdict
from compare.report.words import describe_task
from compare.results import SMALLEST_CLAIM, CollectiveSeries, Comparison, Group, GroupResult, Results
from records.throughput import NUM_WARMUP_STEPS

_OUTSIDE_RACES = (
    "Not all runs are those of a race: they are compared in the order in which they were made, and what changed "
    "between them, such as what else the machine did, is in no interval."
)


def analyse(runs: Sequence[Run], collectives: Sequence[CollectiveSeries], info: ReportInfo) -> Results:
    """Compares runs.

    Args:
        runs: The runs.
        collectives: What the benchmark of collectives measured.
        info: What else the report says.

    Raises:
        NothingToReport: No timed run completed.
        UnknownOpponent: The opponent was not ranked.
    """
    counting = counted(runs)
    runs, everyone = counting.runs, counting.groups
    grouped = [kept for entrants in everyone if (kept := without_bare(entrants))]
    if not grouped:
        raise NothingToReport("no timed run completed, so there is nothing to report")
    completed = [run for run in without_peers(runs) if run.is_usable]
    several = several_machines(completed)
    groups = [
        _group_result(key, entrants, completed, several=several)
        for key, entrants in zip(keys_of(grouped), grouped, strict=True)
    ]
    failures = [
        f"{run.entrant} {'is left out' if run.record.status == 'completed' else 'failed'}: "
        f"{run.why_unusable} ({run.name})"
        for run in runs
        if not run.is_usable
    ]
    problems = [*info.problems, *failures, *counting.disturbed, *mixtures_of(completed)]
    standings = standings_of(groups, grouped, info.conditions, info.opponent)
    peers = peers_of(counting.peers, groups, grouped, standings)
    results = Results(
        title=info.title,
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        verdict=[],
        groups=groups,
        standings=standings,
        peers=peers,
        adapter_costs=adapter_costs_of(keys_of(grouped), [entrants for entrants in everyone if without_bare(entrants)]),
        curves=curves_of(groups, grouped, info.target_accuracy),
        seed_table=seed_table_of(groups, grouped),
        scaling=scaling_of(groups, grouped),
        collectives=placed(collectives, completed),
        places=places_of(completed),
        idleness=idleness_of([run for entrants in everyone for entrant in entrants for run in entrant.timed]),
        problems=problems,
        commands=dict(info.commands),
        facts={
            **info.facts,
            "warm-up steps left out of every run": NUM_WARMUP_STEPS,
            "confidence of all intervals of differences of one group together": CONFIDENCE,
            "differences never claimed, up to": SMALLEST_CLAIM,
            "energy of runs that took place alone": describe_energy(completed),
        },
    )
    verdict = [*describe_verdict(results), *map(describe_peers, peers), *_outside_races(grouped, results)]
    return results.model_copy(update={"verdict": verdict})


def _outside_races(grouped: Sequence[list[EntrantRuns]], results: Results) -> list[str]:
    """Says that not all of the runs that were compared are those of a race."""
    is_compared = any(len(standing.placings) > 1 for standing in results.standings)
    of_races = all(entrant.is_of_races for entrants in grouped for entrant in entrants)
    return [_OUTSIDE_RACES] if is_compared and not of_races else []


def _group_result(key: str, runs: list[EntrantRuns], completed: Sequence[Run], *, several: bool) -> GroupResult:
    entrants = [
        measure_entrant(entrant, entrant_parity(entrant, runs, completed), shares)
        for entrant, shares in zip(runs, shares_of_long_steps(runs), strict=True)
    ]
    run = sample_of(runs)
    sample, config = run.record, run.record.config
    conditions = condition(run)
    machine = conditions.pop("machine")
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
        machine=machine if several else None,
        conditions=conditions,
    )
    ranked = [runs[index] for index, entrant in enumerate(entrants) if entrant.ranked]
    comparisons = _comparisons(ranked)
    names = {name: None for entrant in entrants for name in entrant.settings}
    measured = [entrant for entrant in entrants if entrant.num_runs]
    differing = [name for name in names if len({entrant.settings.get(name) for entrant in measured}) > 1]
    return GroupResult(group=group, entrants=entrants, comparisons=comparisons, differing_settings=differing)


def _comparisons(ranked: Sequence[EntrantRuns]) -> list[Comparison]:
    """Compares each pair of entrants; runs outside a race are paired in the order in which they were made."""
    twos = list(combinations(ranked, 2))
    compared = compare_group([paired(first, second) for first, second in twos])
    return [
        comparison.model_copy(update={"text": f"{comparison.text} (the runs were not made in blocks)"})
        if not (first.is_of_races and second.is_of_races)
        else comparison
        for comparison, (first, second) in zip(compared, twos, strict=True)
    ]
