"""The tables of the report."""

from __future__ import annotations

import json
import statistics
from typing import Any

from compare.machine_facts import Place
from compare.numbers import NOTHING, interval, longer, part_of_step, percent, points, score
from compare.report.page import Cell, Row, Table, measured
from compare.report.seats import Seat, describe_seats, seats_of
from compare.report.words import largest, metric_heading, seen_from
from compare.results import (
    ASKED,
    RANKED,
    Claim,
    CollectiveSeries,
    Curve,
    Entrant,
    GroupResult,
    Interval,
    SeedRow,
    Setting,
)
from compare.steps import Breakdown
from parity.verdict import Parity

_MIB = 1 / 2**20
_VERDICTS = {
    "reference": "✓ is the reference",
    "bitwise": "✓ the same bits",
    "rounding": "✓ the same up to rounding",
    "approximate": "≈ an approximation, as asked for",
    "not comparable": "✗ not comparable",
    "unknown": "? unknown",
}
# Why an entrant is not ranked that was measured, by its verdict.
_NOT_RANKED = {
    "not comparable": "out of lockstep",
    "approximate": "approximate",
    "unknown": "lockstep not known",
}
# What is said of ranks that work alone, instead of whether they are ranked.
NO_COMMUNICATION = "no communication"
# What columns are called.
CPU_TIME = "CPU time of a step, all ranks (ms)"
COVERED = "parts / diagnosed step (%)"
Standings = dict[tuple[str, str], str]

# How the sentence about an entrant goes on.
_SAME_BITS = "; its timed runs end with the same bits as "
# What settings are called whose names do not say it.
_SETTINGS = {
    "start_method": "started by",
    "imbalance": "the rank with most to compute, relative to the mean",
    "allocator": "memory allocator",
    "batching": "batches",
    "schedule_steps": "steps of the learning rate's schedule",
    "positions_per_token": "positions computed for each token",
    "inner_dtype": "dtype of an inner layer",
    "reductions_per_step": "calls into the communication library per step",
    "reduced_elements_per_step": "elements communicated per step",
    "reduced_bytes_per_step": "bytes communicated per step",
    "python": "Python",
}


def standing(entrant: Entrant) -> str:
    """Says in a word or two why an entrant is not ranked; empty if it is."""
    if entrant.ranked:
        return ""
    if not entrant.num_runs:
        return "failed" if entrant.failures else "not measured"
    if entrant.role == "limit":
        return NO_COMMUNICATION
    return _NOT_RANKED.get(entrant.parity.verdict, "not ranked")


def mark(entrant: Entrant) -> str:
    """Returns how the row of an entrant is marked."""
    return "failed" if standing(entrant) == "failed" else "unranked" if standing(entrant) else ""


def standings(groups: list[GroupResult]) -> Standings:
    """Returns why backends are not ranked, by group and backend."""
    return {(result.group.key, entrant.name): standing(entrant) for result in groups for entrant in result.entrants}


def standing_cell(entrant: Entrant) -> Cell:
    """Returns the cell that says whether an entrant is ranked."""
    return Cell({"": "ranked", "failed": "✗ failed"}.get(standing(entrant), f"⚠ {standing(entrant)}"))


def interval_cell(value: Interval | None, scale: float = 1.0) -> Cell:
    """Returns a cell for an estimate with its interval."""
    return Cell(NOTHING) if value is None else Cell(interval(value, scale), value.estimate * scale)


def part_cell(breakdown: Breakdown, part: str) -> Cell:
    """Returns the cell for a part of a step in milliseconds, which noise may hide."""
    return Cell(part_of_step(breakdown, part), 1e3 * breakdown.resolved(part))


def parity_table(groups: list[GroupResult]) -> Table:
    """Returns who computes the same as the reference; entrants of which the same is said share a row."""
    said: dict[tuple[str, ...], list[Seat]] = {}
    seats = [(seat, entrant) for seat, entrant in seats_of(groups) if entrant.role in RANKED]
    for seat, entrant in seats:
        parity = entrant.parity
        step = NOTHING if parity.first_step is None else str(parity.first_step)
        findings = (parity.verdict, _how_close(parity), step, parity.parameter or NOTHING)
        said.setdefault(findings, []).append(seat)
    everyone = [seat for seat, _ in seats]
    columns = ["entrants", "verdict", "how close", "first step that differs", "first parameter that differs"]
    rows = [
        Row(
            [Cell(describe_seats(sitting, everyone)), Cell(_VERDICTS[verdict]), *map(Cell, rest)],
            "unranked" if verdict in ("approximate", "not comparable", "unknown") else "",
        )
        for (verdict, *rest), sitting in said.items()
    ]
    return Table("Whether each entrant computes the same as the reference", columns, rows).without_empty_columns()


def _how_close(parity: Parity) -> str:
    """Returns the sentence about an entrant without the names of others, which differ from entrant to entrant."""
    head, mark, _ = parity.detail.partition(_SAME_BITS)
    return f"{head}; timed runs end with the same bits as those of others" if mark else head


def finding(claim: Claim, interval: Interval | None) -> str:
    """Says in a few words what was found of an entrant beside another."""
    if claim == "none":
        return f"at most {points(largest(interval))} % apart"
    return {"slower": "slower", "faster": "faster", "too few": "too few starts"}[claim]


def comparison_table(result: GroupResult, opponent: str | None) -> Table:
    """Returns every pair of a group; where the opponent takes part, the other is compared with it."""
    columns = ["entrant", "compared with", "takes longer by", "finding", "starts", "would have been found (%)"]
    columns += ["more starts needed", "due to turns (± %)", "due to starting (± %)"]
    seen = [seen_from(one.second, one) if one.second == opponent else one for one in result.comparisons]
    rows = [
        Row(
            [
                Cell(one.second),
                Cell(one.first),
                Cell(longer(one.slowdown), one.slowdown.estimate if one.slowdown else None),
                Cell(finding(one.claim, one.slowdown)),
                measured(one.num_pairs),
                measured(one.detectable, 1, percent),
                measured(one.more_repeats),
                measured(one.spread.turns if one.spread else None, 1, percent),
                measured(one.spread.starting if one.spread else None, 1, percent),
            ]
        )
        for one in sorted(seen, key=lambda one: one.first != opponent)
    ]
    return Table(f"Pairs, {result.group.key}", columns, rows).without_empty_columns()


def measurement_table(result: GroupResult) -> Table:
    """Returns everything measured of the backends of a group."""
    columns = ["backend", "standing", "timed runs", "failed runs", "samples/s", "tokens/s", "median step (ms)"]
    columns += ["95 % of steps within (ms)", CPU_TIME, "instructions of a step (millions)"]
    columns += ["first step after (s)", "memory of a rank (MiB)", "GPU memory (MiB)", "model FLOP utilisation (%)"]
    rows = [
        Row(
            [
                Cell(entrant.name),
                standing_cell(entrant),
                measured(entrant.num_runs),
                measured(len(entrant.failures) or None),
                interval_cell(entrant.samples_per_second),
                interval_cell(entrant.tokens_per_second),
                measured(entrant.median_step_seconds, 1e3),
                measured(entrant.p95_step_seconds, 1e3),
                measured(entrant.mean_step_cpu_seconds, 1e3),
                measured(entrant.mean_step_instructions, 1e-6),
                measured(statistics.median(entrant.seconds_to_first_step) if entrant.seconds_to_first_step else None),
                measured(entrant.peak_memory_bytes, _MIB),
                measured(entrant.peak_cuda_memory_bytes, _MIB),
                measured(entrant.mfu, 1, percent),
            ],
            mark(entrant),
        )
        for entrant in result.entrants
    ]
    return Table(f"Measurements, {result.group.key}", columns, rows).without_empty_columns()


def wire_table(result: GroupResult) -> Table:
    """Returns the table of what the ranks sent."""
    columns = ["backend", "interface", "sent by a rank in a step (MiB)", "all gradients (MiB)"]
    columns += ["lower bound of a ring (MiB)", "sent / bound", "reductions in a step"]
    rows = [
        Row(
            [
                Cell(entrant.name),
                Cell(entrant.wire.interface),
                measured(entrant.wire.bytes_per_step, _MIB),
                measured(entrant.wire.gradient_bytes, _MIB),
                measured(entrant.wire.ring_bound, _MIB),
                measured(entrant.wire.bytes_per_step / entrant.wire.ring_bound if entrant.wire.ring_bound else None),
                measured(entrant.wire.reductions_per_step),
            ],
            mark(entrant),
        )
        for entrant in result.entrants
        if entrant.wire
    ]
    return Table(f"Data sent, {result.group.key}", columns, rows).without_empty_columns()


def settings_table(groups: list[GroupResult]) -> Table:
    """Returns the settings in force, those that differ between entrants first; a value that many have is said once."""
    values: dict[str, dict[str, list[Seat]]] = {}
    seats = [(seat, entrant) for seat, entrant in seats_of(groups) if entrant.settings]
    for seat, entrant in seats:
        for name, value in entrant.settings.items():
            in_force = name.removeprefix(ASKED)
            if in_force == name or entrant.settings.get(in_force) != value:
                values.setdefault(name, {}).setdefault(_written(value), []).append(seat)
    differing = {name for result in groups for name in result.differing_settings}
    everyone = [seat for seat, _ in seats]
    rows = [
        Row(
            [Cell(_called(name)), Cell(value), Cell(describe_seats(found, everyone))],
            "differs" if name in differing else "",
        )
        for name in sorted(values, key=lambda name: name not in differing)
        for value, found in values[name].items()
    ]
    return Table("Settings in force, read back from the running processes", ["setting", "value", "entrants"], rows)


def _called(name: str) -> str:
    if name.startswith(ASKED):
        return f"asked: {name.removeprefix(ASKED)}"
    return _SETTINGS.get(name, name)


def _written(value: Setting) -> str:
    return NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def training_table(curves: list[Curve], standings: Standings) -> Table:
    """Returns what training to the end led to, and how long it took, for the backends of one group."""
    notes = [standings.get((curve.group, curve.backend), "") for curve in curves]
    metrics = list(dict.fromkeys(name for curve in curves for name in curve.metrics))
    columns = [
        "backend",
        "standing",
        "steps",
        *(metric_heading(name, curves) for name in metrics),
        "target",
        "target reached after (s)",
        "training (s)",
        "whole job (s)",
    ]
    rows = [
        Row(
            [
                Cell(curve.backend),
                Cell(f"⚠ {note}" if note else ""),
                measured(curve.steps[-1] if curve.steps else None),
                *(measured((curve.metrics.get(name) or [None])[-1], written=score) for name in metrics),
                measured(curve.target),
                measured(curve.seconds_to_target),
                measured(curve.seconds[-1] if curve.seconds else None),
                measured(curve.total_seconds),
            ],
            "unranked" if note else "",
        )
        for curve, note in zip(curves, notes, strict=True)
    ]
    return Table(f"Trained to the end, {curves[0].group}", columns, rows).without_empty_columns()


def fit_table(series: list[CollectiveSeries], what: str) -> Table:
    """Returns the latency and the bandwidth of each path."""
    columns = ["backend", "transport", "latency (µs)", "bandwidth (GiB/s)"]
    rows = [
        Row(
            [
                Cell(one.name),
                Cell(one.transport),
                interval_cell(one.fit.latency_seconds, 1e6),
                interval_cell(one.fit.bytes_per_second, 1 / 2**30),
            ]
        )
        for one in series
        if one.fit
    ]
    return Table(f"{what}: time = latency + bytes / bandwidth", columns, rows)


def seed_table(rows: list[SeedRow]) -> Table:
    """Returns the table that published comparisons consist of."""
    f1, auc = metric_heading("f1", rows, shown="F1"), metric_heading("roc_auc", rows, shown="AUC")
    columns = ["hardware", "backend", "train time (s)", f1, "macro F1", auc, "accuracy", "batch size"]
    cells = [
        [
            Cell(row.hardware),
            Cell(row.backend),
            measured(row.train_seconds),
            measured(row.f1, written=score),
            measured(row.macro_f1, written=score),
            measured(row.roc_auc, written=score),
            measured(row.accuracy, written=score),
            Cell(row.batch_size),
        ]
        for row in rows
    ]
    table = Table("Backends in the form of published comparisons", columns, [Row(row) for row in cells])
    return table.without_empty_columns()


def place_table(places: list[Place]) -> Table:
    """Returns the table of where the runs took place."""
    columns = ["machine", "software", "runs", "how idle it was"]
    rows = [
        Row([Cell(place.machine), Cell(place.software), measured(place.num_runs), Cell(place.idleness or NOTHING)])
        for place in places
    ]
    return Table("Where the runs took place", columns, rows).without_empty_columns()


def fact_table(facts: dict[str, Any]) -> Table:
    """Returns the table of how the race was run."""
    rows = [Row([Cell(name.replace("_", " ")), _fact(value)]) for name, value in facts.items()]
    return Table("How the race was run", ["what", "value"], rows)


def _fact(value: Any) -> Cell:
    if value is None:
        return Cell(NOTHING)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int | float):
        return Cell(f"{value:g}" if isinstance(value, float) else str(value), value)
    return Cell(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
