"""What the report shows below its first screen, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from compare.numbers import points
from compare.report import figures as report_figures
from compare.report import tables as report_tables
from compare.report.bare import adapter_cost_blocks
from compare.report.figures import Styles
from compare.report.gate_table import GATE_HEADINGS, gate_cells, gate_values, verdict_of
from compare.report.lost_speed import where_speed_is_lost_elsewhere
from compare.report.memory import memory_table
from compare.report.page import Block, Cell, Commands, Figure, Lines, Row, Section, Table, Text
from compare.report.peer_tables import peer_section
from compare.report.styles import styles_for
from compare.results import SMALLEST_CLAIM, CollectiveSeries, Curve, GroupResult, Results, Scaling

_T = TypeVar("_T")


def details(results: Results, styles: Styles) -> list[Section]:
    """Returns what is below the first screen, folded, as far as there is something to show."""
    groups = results.groups
    everything = [
        Section("lockstep", "Did all compute the same?", _parity(groups)),
        Section("pairs", "Every pair that was compared", _pairs(results)),
        Section("measurements", "Throughput, step times and where they go", *_measurements(groups, styles)),
        Section("settings", "Settings in force", _tables(report_tables.settings_table(groups))),
        Section("training", "Trained to the end", sections=_trainings(results, styles)),
        Section("scaling", "Scaling under all conditions", _scaling(results, styles)),
        Section("collectives", "Collectives alone", sections=_collectives(results.collectives, styles)),
        Section("table", "The table of published comparisons", _seed_table(results)),
        Section("problems", "What could not be used or compared", _lines(results.problems)),
        Section("environment", "Where and how the race was run", _environment(results)),
        Section("commands", "Commands", [Commands(results.commands)] if results.commands else []),
    ]
    return [section for section in everything if section.blocks or section.sections]


def beside_the_ranking(results: Results) -> list[Section]:
    """Returns what is shown before the details, but is no ranking: a gate, what adapters cost, and peers."""
    everything = [
        Section("gate", "Compared with the baseline", _gate(results)),
        Section("bare", "What the adapters cost", adapter_cost_blocks(results.adapter_costs)),
        peer_section(results),
    ]
    return [section for section in everything if section.blocks or section.sections]


def _gate(results: Results) -> list[Block]:
    if results.gate is None:
        return []
    rows = [
        Row([Cell(text, value) for text, value in zip(gate_cells(row), gate_values(row), strict=True)])
        for row in results.gate.rows
    ]
    return [Lines(verdict_of(results.gate)), Table("Each entrant then and now", list(GATE_HEADINGS), rows)]


def look_of(results: Results) -> Styles:
    """Gives backends their looks, in the order in which the report names them."""
    entrants = [entrant.name for result in results.groups for entrant in result.entrants]
    others: list[Curve | Scaling | CollectiveSeries] = [*results.curves, *results.scaling, *results.collectives]
    return styles_for([*entrants, *(one.backend for one in others)])


def _parity(groups: list[GroupResult]) -> list[Block]:
    if not any(result.entrants for result in groups):
        return []
    text = "Only entrants that compute the same as the reference are ranked."
    if any(entrant.parity.verdict == "approximate" for result in groups for entrant in result.entrants):
        text += " Those that compute an approximation on purpose are shown beside them, marked ≈."
    return [Text(text), report_tables.parity_table(groups)]


def _pairs(results: Results) -> list[Block]:
    text = (
        "Intervals hold together at 95 % for all pairs under the same conditions. A difference is claimed if its whole "
        f"interval lies beyond {points(SMALLEST_CLAIM)} %."
    )
    if any(one.spread for result in results.groups for one in result.comparisons):
        text += (
            " The last two columns are standard deviations of the mean of one start: the part due to its turns, which "
            "more turns reduce, and the part due to starting, the same for all pairs, which only more starts average "
            "out."
        )
    opponents = {one.placings[0].group: one.placings[0].name for one in results.standings}
    tables = _tables(
        *(report_tables.comparison_table(result, opponents.get(result.group.key)) for result in results.groups)
    )
    return [Text(text), *tables] if tables else []


def _measurements(groups: list[GroupResult], styles: Styles) -> tuple[list[Block], list[Section]]:
    """Returns how to read the figures of all groups, and a section for each group."""
    tasks = list(dict.fromkeys(result.group.task for result in groups))
    explained: list[Block] = [Lines(report_figures.EXPLANATIONS)] if groups else []
    sections = [
        Section(f"group-{i}", result.group.key, _of_group(result, styles, with_task=len(tasks) > 1))
        for i, result in enumerate(groups, start=1)
    ]
    return explained, sections


def _of_group(result: GroupResult, styles: Styles, *, with_task: bool) -> list[Block]:
    group = result.group
    ranks, samples = _counted(group.num_processes, "rank"), _counted(group.global_batch_size, "sample")
    about = (
        f"On {group.device}: {ranks}, {group.precision}, {samples} in a step "
        f"= {ranks} x {_counted(group.micro_batch_size, 'sample')} x "
        f"{_counted(group.gradient_accumulation_steps, 'accumulation step')}, seed {group.seed}."
    )
    if with_task:
        about = f"{group.task}. {about}"
    figures = [
        report_figures.throughput_figure(result, styles),
        report_figures.step_time_figure(result, styles),
        report_figures.breakdown_figure(result, styles),
    ]
    tables = _tables(report_tables.measurement_table(result), report_tables.wire_table(result), memory_table(result))
    failures = [f"{entrant.name} failed: {line}" for entrant in result.entrants for line in entrant.failures]
    return [Text(about), *_lines(failures), *tables, *_present(figures)]


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
    figures = [report_figures.scaling_figure(group, styles) for group in groups]
    explanation = [Text(report_figures.EXPLANATION_OF_SCALING)] if figures else []
    return [*explanation, *figures, *_lines(where_speed_is_lost_elsewhere(results))]


def _collectives(collectives: list[CollectiveSeries], styles: Styles) -> list[Section]:
    def blocks(series: list[CollectiveSeries], title: str) -> list[Block]:
        table = report_tables.fit_table(series, title)
        return [report_figures.collective_figure(series, styles), *([table] if table.rows else [])]

    def place(series: CollectiveSeries) -> str:
        network = f"; nodes with {series.network}" if series.network else ""
        return network + (f"; {series.machine.label}" if series.machine and several else "")

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
    return _tables(report_tables.place_table(results.places), report_tables.fact_table(results.facts))


def _tables(*tables: Table) -> list[Block]:
    return [table for table in tables if table.rows]


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
