"""The tables of the report."""

from __future__ import annotations

import json
import statistics
from typing import Any

from compare.numbers import NOTHING, difference, interval, part_of_step, percent, score
from compare.report.page import Cell, Row, Table, measured
from compare.report.words import metric_heading
from compare.results import (
    Breakdown,
    CollectiveSeries,
    Comparison,
    Curve,
    Entrant,
    GroupResult,
    Interval,
    Place,
    SeedRow,
)

_MIB = 1 / 2**20
_VERDICTS = {
    "reference": "✓ is the reference",
    "bitwise": "✓ the same bits",
    "rounding": "✓ the same up to rounding",
    "not comparable": "✗ not comparable",
    "unknown": "? unknown",
}
Standings = dict[tuple[str, str], str]

_CLAIMS = {
    "slower": "second is slower",
    "faster": "second is faster",
    "none": "no significant difference",
    "too few": "too few pairs",
}


def standing(entrant: Entrant) -> str:
    """Says in a word or two why an entrant is not ranked; empty if it is."""
    if entrant.ranked:
        return ""
    if not entrant.num_runs:
        return "failed" if entrant.failures else "not measured"
    return "out of lockstep" if entrant.parity.verdict == "not comparable" else "not ranked"


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
    """Returns the table of who computes the same as the reference."""
    columns = ["backend", "group", "verdict", "how close", "first step that differs", "first parameter that differs"]
    rows = [
        Row(
            [
                Cell(entrant.name),
                Cell(result.group.key),
                Cell(_VERDICTS[entrant.parity.verdict]),
                Cell(entrant.parity.detail),
                measured(entrant.parity.first_step),
                Cell(entrant.parity.parameter or NOTHING),
            ],
            "unranked" if entrant.parity.verdict in ("not comparable", "unknown") else "",
        )
        for result in groups
        for entrant in result.entrants
    ]
    return Table("Whether each backend computes the same as the reference", columns, rows).without_empty_columns()


def comparison_table(comparisons: list[Comparison], key: str) -> Table:
    """Returns the numbers behind the claims about a group."""
    columns = ["second against first", "difference in time (%)", "from (%)", "to (%)", "pairs of runs", "claim"]
    columns += ["smallest detectable difference (%)", "more repeats needed"]
    rows = [
        Row(
            [
                Cell(f"{comparison.second} against {comparison.first}"),
                *(
                    measured(getattr(comparison.slowdown, bound, None), 1, difference)
                    for bound in ("estimate", "low", "high")
                ),
                measured(comparison.num_pairs),
                Cell(_CLAIMS[comparison.claim]),
                measured(comparison.detectable, 1, percent),
                measured(comparison.more_repeats),
            ]
        )
        for comparison in comparisons
    ]
    return Table(f"Pairs of backends, {key}", columns, rows).without_empty_columns()


def measurement_table(result: GroupResult) -> Table:
    """Returns everything measured of the backends of a group."""
    columns = ["backend", "standing", "timed runs", "failed runs", "samples/s", "tokens/s", "median step (ms)"]
    columns += ["95 % of steps within (ms)", "first step after (s)", "memory of a rank (MiB)", "GPU memory (MiB)"]
    columns += ["model FLOP utilisation (%)"]
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


def settings_table(result: GroupResult) -> Table:
    """Returns the settings in force, those that differ first."""
    entrants = [entrant for entrant in result.entrants if entrant.settings]
    names = dict.fromkeys(name for entrant in entrants for name in entrant.settings)
    in_order = sorted(names, key=lambda name: name not in result.differing_settings)
    rows = [
        Row(
            [
                Cell(name),
                Cell("≠ differs" if name in result.differing_settings else "same"),
                *(Cell(entrant.settings.get(name, NOTHING)) for entrant in entrants),
            ],
            "differs" if name in result.differing_settings else "",
        )
        for name in in_order
    ]
    columns = ["setting", "backends", *(entrant.name for entrant in entrants)]
    return Table(f"Settings in force, {result.group.key}", columns, rows)


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
                Cell(one.backend),
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
