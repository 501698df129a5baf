"""The first screen of a report: what a reader sees before anything is unfolded, in every form of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compare.numbers import NOTHING, longer, number, percent
from compare.report import plots
from compare.report.drawing import Axis
from compare.report.figures import Styles
from compare.report.lost_speed import times, where_speed_is_lost
from compare.report.page import Cell, Figure, Plot, Row, Table, measured
from compare.report.plots import Item, Line
from compare.report.trust import Ground, grounds_of, warnings_of
from compare.report.verdict import breakdown_of, speed_of, takes_the_least_time
from compare.results import Placing, Results, Standing

_EDGE = " What takes more than twice as long is at the right edge, outside of the scale."


@dataclass(frozen=True)
class FirstScreen:
    """What a report shows first.

    Attributes:
        about: What was computed, where and under which conditions, in a line.
        warnings: Why the report is not to be relied on.
        verdict: The sentences of the verdict.
        grounds: Why the report may be trusted.
        figures: How long a step takes, and what more ranks give.
        tables: The numbers of the first conditions and, in a row each, those of the others.
        lost: Where the speed is lost that more ranks do not give, in a sentence; empty if that was not measured.
    """

    about: str
    warnings: Sequence[str]
    verdict: Sequence[str]
    grounds: Sequence[Ground]
    figures: Sequence[Figure]
    tables: Sequence[Table]
    lost: str = ""


def first_screen(results: Results, styles: Styles) -> FirstScreen:
    """Returns the first screen: the first conditions in full, and a row for each of the others."""
    standings, lost, drawn = results.standings, "", []
    if standings:
        lost = where_speed_is_lost(standings[0], breakdown_of(standings[0].placings[0], results))
        drawn = [forest_figure(standings[0], styles), ranks_figure(standings[0], styles, lost)]
    tables = [standing_table(one) for one in standings[:1]]
    if len(standings) > 1:
        tables.append(conditions_table(standings[1:]))
    return FirstScreen(
        about=_about(results),
        warnings=warnings_of(results),
        verdict=results.verdict,
        grounds=grounds_of(results) if results.groups else [],
        figures=[figure for figure in drawn if figure],
        tables=tables,
        lost=lost,
    )


def forest_figure(standing: Standing, styles: Styles) -> Figure | None:
    """Returns how much longer a step takes than the opponent's, for all with as many ranks; None for one entrant."""
    rivals = [one for one in standing.rivals if one.relative is not None]
    if len(rivals) < 2:
        return None
    # A reader may have named another opponent than the fastest.
    opponent = "the least time" if takes_the_least_time(standing) else "compared with"
    items = [
        Item(
            one.name,
            opponent if one.claim is None else longer(one.longer),
            styles[one.name] if one.claim in (None, "slower", "faster") else styles[one.name].hollow(),
            estimate=100 * one.longer.estimate if one.longer else 0.0,
            low=100 * one.longer.low if one.longer and one.longer.low is not None else None,
            high=100 * one.longer.high if one.longer and one.longer.high is not None else None,
        )
        for one in rivals
    ]
    is_far = any(item.estimate > plots.OFF_THE_SCALE for item in items if item.estimate is not None)
    said = "; ".join(f"{one.name} {longer(one.longer)}" for one in rivals[1:])
    title = f"Time of a step against {standing.opponent}, {standing.conditions}"
    return Figure(
        "Who is fastest",
        f"By how much a step takes longer than under {rivals[0].name}, with 95 % intervals. A hollow mark means that a "
        f"difference is not certain. Within the grey zone, nothing is ever claimed.{_EDGE if is_far else ''}",
        [Plot(f"{title}: {said}", plots.forest(items, Axis(f"% longer than {rivals[0].name}")))],
    )


def ranks_figure(standing: Standing, styles: Styles, lost: str) -> Figure | None:
    """Returns the throughput over the number of ranks, with what would be possible; None for one number of ranks.

    Args:
        standing: The standing.
        styles: The looks of its entrants.
        lost: Where speed is lost, for the caption.
    """
    base = standing.base
    if base is None:
        return None
    worlds = sorted({one.num_processes for one in standing.placings})
    by_backend: dict[str, list[Placing]] = {}
    for one in sorted(standing.placings, key=lambda one: one.num_processes):
        by_backend.setdefault(one.name, []).append(one)
    lines = [_line(name, placings, styles) for name, placings in by_backend.items()]
    rate = base.samples_per_second.estimate
    ideal = [Line("each rank as fast as one alone", styles[base.name], worlds, [rate * n / worlds[0] for n in worlds])]
    alone = [one for one in standing.limits if one.num_processes > 1]
    if alone:
        ideal = [_possible(base, alone, styles)]
    whole = [one for one in standing.limits if one.num_processes == 1]
    level = whole[0].samples_per_second.estimate if whole else None
    dotted = "what processes reach that work alone; no more is possible here" if alone else "the ideal"
    dashed = f". The dashed line is {whole[0].label}" if whole else ""
    said = "; ".join(f"{one.label} {number(one.samples_per_second.estimate, 3)}" for one in standing.placings)
    title = f"Samples/s over ranks, {standing.conditions}"
    return Figure(
        "What more ranks give",
        f"The dotted line is {dotted}{dashed}.{f' {lost}' if lost else ''}",
        [
            Plot(
                f"{title}: {said}",
                plots.lines(
                    lines,
                    Axis("ranks", ticks={n: str(n) for n in worlds}),
                    Axis("samples/s", from_zero=True),
                    ideal,
                    level,
                ),
            )
        ],
    )


def standing_table(standing: Standing) -> Table:
    """Returns the numbers of a standing, which every form of the report takes from here."""
    base = standing.base
    opponent = standing.placings[0]
    alone = next((one for one in standing.limits if one.num_processes > 1), None)
    columns = ["entrant", "samples/s", f"step longer than {opponent.label}"]
    columns += [f"speed ({base.label} = 1)"] if base else []
    columns += ["of what is possible (%)"] if alone else []

    def row(one: Placing, mark: str = "", before: str = "") -> Row:
        of_possible = alone is not None and one.num_processes == alone.num_processes and not mark
        against = "" if one is opponent else longer(one.longer)
        cells = [
            Cell(f"{before}{one.label}"),
            measured(one.samples_per_second.estimate, 1, _rate),
            Cell(against, one.longer.estimate if one.longer else None),
            *([measured(speed_of(one, base), 1, times)] if base else []),
            *([measured(speed_of(one, alone), 1, percent) if of_possible and alone else Cell("")] if alone else []),
        ]
        return Row(cells, mark)

    rows = [row(one) for one in standing.placings]
    rows += [row(one, "aside", "≈ ") for one in standing.approximations]
    rows += [row(one, "aside") for one in standing.limits]
    return Table(standing.conditions, columns, rows)


def conditions_table(standings: Sequence[Standing]) -> Table:
    """Returns a row for each standing: the opponent, how the others compare with it, and what more ranks give."""
    rows = []
    for one in standings:
        opponent = one.placings[0]
        alone = next((limit for limit in one.limits if limit.num_processes == opponent.num_processes > 1), None)
        whole = next((limit for limit in one.limits if limit.num_processes == 1), None)
        cells = [
            Cell(one.conditions),
            Cell(opponent.label),
            measured(opponent.samples_per_second.estimate, 1, _rate),
            Cell(_compared(one)),
            measured(speed_of(opponent, one.base) if one.base else None, 1, times),
            measured(speed_of(opponent, alone) if alone else None, 1, percent),
            Cell(longer(whole.longer) if whole else NOTHING, whole.longer.estimate if whole and whole.longer else None),
        ]
        rows.append(Row(cells))
    columns = ["conditions", "compared with", "its samples/s", "the others take longer by", "speed (fewest ranks = 1)"]
    alternatives = dict.fromkeys(limit.label for one in standings for limit in one.limits if limit.num_processes == 1)
    columns += ["of what is possible (%)", f"{' or '.join(alternatives)} takes longer by"]
    return Table("Under other conditions", columns, rows).without_empty_columns()


def conditions_line(standing: Standing) -> str:
    """Returns the same for a terminal, in a sentence."""
    opponent = standing.placings[0]
    rate = _rate(opponent.samples_per_second.estimate)
    others = _compared(standing)
    compared = f"; time of a step against it: {others}" if others else ""
    return f"{standing.conditions}: {opponent.label} reaches {rate} samples/s{compared}"


def _compared(standing: Standing) -> str:
    return "; ".join(f"{one.name} {longer(one.longer)}" for one in standing.rivals[1:])


def _rate(value: float) -> str:
    return number(value, 3)


def _line(name: str, placings: Sequence[Placing], styles: Styles) -> Line:
    """Returns a line; an interval that is wider than the value itself says nothing, and would hide all others."""
    rates = [one.samples_per_second for one in placings]
    known = [rate.low is not None and rate.high is not None and rate.high - rate.low < rate.estimate for rate in rates]
    return Line(
        name,
        styles[name],
        [one.num_processes for one in placings],
        [rate.estimate for rate in rates],
        [rate.low if is_known else None for rate, is_known in zip(rates, known, strict=True)],
        [rate.high if is_known else None for rate, is_known in zip(rates, known, strict=True)],
    )


def _possible(base: Placing, alone: Sequence[Placing], styles: Styles) -> Line:
    points_of = sorted([base, *alone], key=lambda one: one.num_processes)
    return Line(
        "processes that work alone",
        styles[base.name],
        [one.num_processes for one in points_of],
        [one.samples_per_second.estimate for one in points_of],
    )


def _about(results: Results) -> str:
    """Says what was computed, where, and under which conditions."""
    if not results.groups:
        return ""
    machines = "; ".join(dict.fromkeys(place.machine for place in results.places))
    conditions = results.standings[0].conditions if results.standings else results.groups[0].group.key
    return f"{conditions}. {results.groups[0].group.task}{f'. {machines}' if machines else ''}"
