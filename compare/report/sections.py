"""What the report shows, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from compare.numbers import joined
from compare.report import figures as report_figures
from compare.report import tables as report_tables
from compare.report.bare import adapter_cost_blocks
from compare.report.figures import Styles
from compare.report.gate_table import GATE_HEADINGS, gate_cells, verdict_of
from compare.report.page import Block, Cell, Commands, Figure, Lines, Row, Section, Table, Text
from compare.report.peer_tables import peer_section
from compare.report.standing_figure import standing_figure
from compare.report.styles import styles_for
from compare.results import CollectiveSeries, Curve, GroupResult, Results, Scaling

_T = TypeVar("_T")


def sections(results: Results) -> list[Section]:
    """Returns all sections that have something to show."""
    styles = styles_for(_backends(results))
    everything = [
        Section("gate", "Compared with the baseline", _gate(results)),
        Section("standings", "How long a step takes", [standing_figure(one, styles) for one in results.standings]),
        Section("lockstep", "Did they compute the same?", _parity(results.groups)),
        Section("claims", "Who is faster?", sections=_each(results.groups, "claims", _claims)),
        *_each(results.groups, "group", lambda result: _measurements(result, styles)),
        peer_section(results),
        Section("training", "Trained to the end", sections=_trainings(results, styles)),
        Section("scaling", "Scaling", _scaling(results, styles)),
        Section("bare", "What the adapters cost", adapter_cost_blocks(results.adapter_costs)),
        Section("collectives", "Collectives alone", sections=_collectives(results.collectives, styles)),
        Section("table", "The table of published comparisons", _seed_table(results)),
        Section("problems", "What could not be used or compared", _lines(results.problems)),
        Section("environment", "Environment", _environment(results)),
        Section("commands", "Commands", [Commands(results.commands)] if results.commands else []),
    ]
    return [section for section in everything if section.blocks or section.sections]


def _gate(results: Results) -> list[Block]:
    if results.gate is None:
        return []
    rows = [Row([Cell(cell) for cell in gate_cells(row)]) for row in results.gate.rows]
    return [Lines(verdict_of(results.gate)), Table("Each entrant then and now", list(GATE_HEADINGS), rows)]


def _backends(results: Results) -> list[str]:
    """Returns the backends in the order in which the report names them, which decides how they look."""
    entrants = [entrant.name for result in results.groups for entrant in result.entrants]
    others: list[Curve | Scaling | CollectiveSeries] = [*results.curves, *results.scaling, *results.collectives]
    return [*entrants, *(one.backend for one in others)]


def _parity(groups: list[GroupResult]) -> list[Block]:
    entrants = [entrant for result in groups for entrant in result.entrants]
    if not entrants:
        return []
    left = dict.fromkeys(entrant.name for entrant in entrants if entrant.parity.verdict == "not comparable")
    text = "Only backends that compute the same as the reference take part in claims about speed."
    if left:
        text += f" Out of lockstep, and therefore shown but not ranked: {joined(list(left))}."
    return [Text(text), report_tables.parity_table(groups)]


def _claims(result: GroupResult) -> list[Block]:
    if not result.comparisons:
        return [Text("There are no two backends to compare under these conditions.")]
    table = report_tables.comparison_table(result.comparisons, result.group.key)
    return [Lines([comparison.text for comparison in result.comparisons]), table]


def _measurements(result: GroupResult, styles: Styles) -> list[Block]:
    group = result.group
    ranks, samples = _counted(group.num_processes, "rank"), _counted(group.global_batch_size, "sample")
    about = (
        f"{group.task}. On {group.device}: {ranks}, {group.precision}, {samples} in a step "
        f"= {ranks} x {_counted(group.micro_batch_size, 'sample')} x "
        f"{_counted(group.gradient_accumulation_steps, 'accumulation step')}, seed {group.seed}."
    )
    figures = [
        report_figures.throughput_figure(result, styles),
        report_figures.step_time_figure(result, styles),
        report_figures.breakdown_figure(result, styles),
    ]
    tables = [
        report_tables.measurement_table(result),
        report_tables.wire_table(result),
        report_tables.settings_table(result),
    ]
    failures = [f"{entrant.name} failed: {line}" for entrant in result.entrants for line in entrant.failures]
    return [Text(about), *_present(figures), *_lines(failures), *(table for table in tables if table.rows)]


def _trainings(results: Results, styles: Styles) -> list[Section]:
    standings = report_tables.standings(results.groups)

    def blocks(curves: list[Curve]) -> list[Block]:
        figures = [
            report_figures.loss_figure(curves, styles, standings),
            report_figures.metric_figure(curves, styles, standings),
        ]
        return [*_present(figures), report_tables.training_table(curves, standings)]

    groups = _grouped(results.curves, lambda curve: curve.group)
    return [Section(f"training-{i}", group[0].group, blocks(group)) for i, group in enumerate(groups, start=1)]


def _scaling(results: Results, styles: Styles) -> list[Block]:
    groups = _grouped([one for one in results.scaling if one.points], lambda one: (one.kind, one.condition))
    return [report_figures.scaling_figure(group, styles) for group in groups]


def _collectives(collectives: list[CollectiveSeries], styles: Styles) -> list[Section]:
    def blocks(series: list[CollectiveSeries], title: str) -> list[Block]:
        table = report_tables.fit_table(series, title)
        return [report_figures.collective_figure(series, styles), *([table] if table.rows else [])]

    def place(series: CollectiveSeries) -> str:
        return f"; {series.machine.label}" if series.machine and several else ""

    drawn = [one for one in collectives if one.points]
    several = len({one.machine.label for one in drawn if one.machine}) > 1
    groups = _grouped(drawn, lambda one: (one.operation, one.num_processes, one.device, place(one)))
    titles = [f"{one.operation}, {one.num_processes} ranks, {one.device}{place(one)}" for one, *_ in groups]
    return [
        Section(f"collectives-{i}", title, blocks(group, title))
        for i, (group, title) in enumerate(zip(groups, titles, strict=True), start=1)
    ]


def _seed_table(results: Results) -> list[Block]:
    return [report_tables.seed_table(results.seed_table)] if results.seed_table else []


def _environment(results: Results) -> list[Block]:
    tables = [report_tables.place_table(results.places), report_tables.fact_table(results.facts)]
    return [table for table in tables if table.rows]


def _each(groups: list[GroupResult], prefix: str, blocks: Callable[[GroupResult], list[Block]]) -> list[Section]:
    return [Section(f"{prefix}-{i}", result.group.key, blocks(result)) for i, result in enumerate(groups, start=1)]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _lines(items: list[str]) -> list[Block]:
    return [Lines(items)] if items else []


def _present(figures: Iterable[Figure | None]) -> list[Block]:
    return [figure for figure in figures if figure is not None]


def _grouped(items: list[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Puts items of equal key together, in the order in which they first appear."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
