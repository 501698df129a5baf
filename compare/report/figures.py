"""The figures of the report: each is drawn, described in a sentence, and given as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compare.numbers import difference, format_size, interval, joined, number, percent, score
from compare.report import plots
from compare.report.drawing import Axis
from compare.report.page import Cell, Figure, Plot, Row, Table, measured
from compare.report.plots import Item, Line
from compare.report.styles import Style
from compare.report.tables import COVERED, Standings, interval_cell, mark, part_cell, standing, standing_cell
from compare.results import CollectiveSeries, Curve, Entrant, GroupResult, Scaling
from compare.steps import Breakdown, parts_in

_MAX_ROWS = 50
_GIB = 2**30

Styles = dict[str, Style]

# How the figures of each group are read.
EXPLANATIONS = [
    "Throughput: large marks are estimates with their confidence intervals, small marks are single runs. Further right "
    "is faster; the axis does not start at zero.",
    "Step times: the thicker a shape is, the more steps took this long. A box contains the middle half of the steps, "
    "and the line in it is their median.",
    "Where the time of a step goes, from a diagnosis run: communication is what the step takes beyond the same work "
    "without communication. Waiting is until the slowest rank has come to its update; where it is not shown, "
    "communication contains it. Building is what the first pass over a batch takes beyond a later one, since libraries "
    "make kernels for each new shape of their input. What noise hides is neither drawn nor summed up.",
]
EXPLANATION_OF_SCALING = "The dotted line is the ideal: as much for each rank as with the fewest ranks."

# A curve with steps, seconds and values of the points that are drawn of it.
_Points = tuple[Curve, Sequence[float], Sequence[float], Sequence[float | None]]


def throughput_figure(result: GroupResult, styles: Styles) -> Figure | None:
    """Returns samples per second with intervals, and those of single runs; None if there are none."""
    entrants = [entrant for entrant in result.entrants if entrant.samples_per_second_of_runs]
    if not entrants:
        return None
    said = "; ".join(
        _named(entrant, f"{interval(entrant.samples_per_second)} samples/s")
        for entrant in entrants
        if entrant.samples_per_second
    )
    items = [
        Item(
            entrant.name,
            standing(entrant),
            styles[entrant.name],
            values=entrant.samples_per_second_of_runs,
            estimate=entrant.samples_per_second.estimate if entrant.samples_per_second else None,
            low=entrant.samples_per_second.low if entrant.samples_per_second else None,
            high=entrant.samples_per_second.high if entrant.samples_per_second else None,
        )
        for entrant in entrants
    ]
    num_runs = max(len(entrant.samples_per_second_of_runs) for entrant in entrants)
    rows = [
        Row(
            [
                Cell(entrant.name),
                standing_cell(entrant),
                interval_cell(entrant.samples_per_second),
                *(measured(rate) for rate in _filled(entrant.samples_per_second_of_runs, num_runs)),
            ],
            mark(entrant),
        )
        for entrant in entrants
    ]
    columns = ["backend", "standing", "samples/s (interval)", *(f"run {i + 1}" for i in range(num_runs))]
    title = f"Throughput, {result.group.key}"
    return Figure(
        "Throughput",
        _sentence(said),
        [Plot(f"{title}: {said}", plots.intervals(items, Axis("samples/s")))],
        Table(title, columns, rows),
    )


def step_time_figure(result: GroupResult, styles: Styles) -> Figure | None:
    """Returns how step times are distributed; None if there are none."""
    pooled = {id(entrant): [s * 1e3 for run in entrant.step_seconds for s in run] for entrant in result.entrants}
    entrants = [entrant for entrant in result.entrants if pooled[id(entrant)]]
    if not entrants:
        return None
    said = "; ".join(
        _named(entrant, f"median {number(entrant.median_step_seconds * 1e3, 3)} ms")
        + (f", 95\u00a0% within {number(entrant.p95_step_seconds * 1e3, 3)} ms" if entrant.p95_step_seconds else "")
        for entrant in entrants
        if entrant.median_step_seconds
    )
    items = [
        Item(entrant.name, standing(entrant), styles[entrant.name], values=pooled[id(entrant)]) for entrant in entrants
    ]
    rows = [
        Row(
            [
                Cell(entrant.name),
                measured(len(pooled[id(entrant)])),
                *(measured(float(value)) for value in np.quantile(pooled[id(entrant)], [0, 0.25, 0.5, 0.75, 0.95, 1])),
            ],
            mark(entrant),
        )
        for entrant in entrants
    ]
    columns = ["backend", "steps", "minimum (ms)", "25 % (ms)", "50 % (ms)", "75 % (ms)", "95 % (ms)", "maximum (ms)"]
    title = f"Step times, {result.group.key}"
    return Figure(
        "Step times",
        _sentence(said),
        [Plot(f"{title}: {said}", plots.distributions(items, Axis("time of a step (ms)")))],
        Table(title, columns, rows),
    )


def breakdown_figure(result: GroupResult, styles: Styles) -> Figure | None:
    """Returns where the time of a step goes; None if no run was diagnosed."""
    diagnosed = [(entrant, entrant.breakdown) for entrant in result.entrants if entrant.breakdown]
    if not diagnosed:
        return None
    shown = parts_in(parts for _, parts in diagnosed)
    said = "; ".join(_named(entrant, _said_of_parts(parts)) for entrant, parts in diagnosed)
    items = [
        Item(
            entrant.name,
            standing(entrant),
            styles[entrant.name],
            values=[1e3 * parts.resolved(part) for part in shown],
        )
        for entrant, parts in diagnosed
    ]
    rows = [
        Row(
            [
                Cell(entrant.name),
                *(part_cell(parts, part) for part in shown),
                measured(parts.total, 1e3),
                measured(parts.covered, 1, percent),
                measured(parts.overhead, 1, difference),
            ],
            mark(entrant),
        )
        for entrant, parts in diagnosed
    ]
    columns = ["backend", *(f"{part} (ms)" for part in shown), "sum (ms)", COVERED]
    columns += ["diagnosed step longer than timed (%)"]
    title = f"Where the time of a step goes, {result.group.key}"
    return Figure(
        "Where the time of a step goes",
        _sentence(said),
        [Plot(f"{title}: {said}", plots.stacks(items, shown, Axis("time of a step (ms)", from_zero=True)))],
        Table(title, columns, rows).without_empty_columns(),
    )


def loss_figure(curves: list[Curve], styles: Styles, standings: Standings) -> Figure | None:
    """Returns the loss over steps and over time; None if no step was taken."""
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        return None
    key = curves[0].group
    width = plots.bin_size(max(len(curve.steps) for curve in curves))
    each = "Each point is one step" if width == 1 else f"Each point is the mean of {width} steps"
    said = "; ".join(f"{curve.backend} ends at {_last(curve.losses)}" for curve in curves)
    drawn = [
        (curve, [part[-1] for part in _bins(curve.steps, width)], [part[-1] for part in _bins(curve.seconds, width)])
        for curve in curves
    ]
    losses = {id(curve): plots.averaged(curve.losses, width) for curve in curves}
    points: list[_Points] = [(curve, steps, time, losses[id(curve)]) for curve, steps, time in drawn]
    over_steps, over_time = _curve_lines(points, styles, standings)
    return Figure(
        "Loss",
        f"{each}. {_coinciding(curves)}{said}.",
        [
            Plot(f"Loss over steps, {key}: {said}", plots.lines(over_steps, Axis("step"), Axis("loss"))),
            Plot(f"Loss over training time, {key}", plots.lines(over_time, Axis("training time (s)"), Axis("loss"))),
        ],
        _curve_table(f"Loss, {key}", "loss", points),
    )


def metric_figure(curves: list[Curve], styles: Styles, standings: Standings) -> Figure | None:
    """Returns accuracy over steps and over time, or the first metric of a task without it; None if there is none."""
    named = [name for curve in curves for name in curve.metrics]
    metric = "accuracy" if "accuracy" in named else next(iter(named), "")
    curves = [curve for curve in curves if curve.evaluation_steps and metric in curve.metrics]
    if not curves:
        return None
    key = curves[0].group
    said = "; ".join(f"{curve.backend} {_last(curve.metrics[metric])}{_reached(curve)}" for curve in curves)
    targets = {curve.target for curve in curves}
    level = targets.pop() if len(targets) == 1 else None
    points: list[_Points] = [
        (curve, curve.evaluation_steps, curve.evaluation_seconds, curve.metrics[metric]) for curve in curves
    ]
    over_steps, over_time = _curve_lines(points, styles, standings)
    named_metric = metric.replace("_", " ")
    title = f"{named_metric.capitalize()}, {key}"
    y = Axis(named_metric)
    return Figure(
        named_metric.capitalize(),
        f"On the validation data, at the end: {said}."
        + (f" The dotted line is the target, {number(level)}." if level else ""),
        [
            Plot(f"{title}, over steps: {said}", plots.lines(over_steps, Axis("step"), y, level=level)),
            Plot(f"{title}, over training time", plots.lines(over_time, Axis("training time (s)"), y, level=level)),
        ],
        _curve_table(title, named_metric, points, written_as_score=True),
    )


def scaling_figure(series: list[Scaling], styles: Styles) -> Figure:
    """Returns throughput over the number of ranks, for one kind of scaling under one condition."""
    title = f"{series[0].kind.capitalize()} scaling, {series[0].condition}"
    meaning = {"strong": "the global batch stays the same", "weak": "the batch of each rank stays the same"}
    said = "; ".join(
        f"{one.backend} {percent(one.points[-1].efficiency)} % of the ideal on {one.points[-1].num_processes} ranks"
        for one in series
    )
    ranks = Axis("ranks", ticks={n: str(n) for n in sorted({p.num_processes for one in series for p in one.points})})
    rates, efficiencies, ideal = [], [], []
    for i, one in enumerate(series):
        worlds = [point.num_processes for point in one.points]
        rate = [point.samples_per_second for point in one.points]
        style = _style(series, i, styles)
        low, high = [point.low for point in rate], [point.high for point in rate]
        rates.append(Line(one.backend, style, worlds, [point.estimate for point in rate], low, high))
        efficiencies.append(Line(one.backend, style, worlds, [100 * point.efficiency for point in one.points]))
        ideal.append(Line("", style, worlds, [_ideal(one, n) for n in worlds]))
    whole = [Line("", line.style, line.x, [100.0] * len(line.x)) for line in ideal]
    rows = [
        Row(
            [
                Cell(one.backend),
                measured(point.num_processes),
                interval_cell(point.samples_per_second),
                measured(_ideal(one, point.num_processes)),
                measured(point.efficiency, 1, percent),
            ]
        )
        for one in series
        for point in one.points
    ]
    return Figure(
        title,
        f"With more ranks, {meaning[series[0].kind]}. {said}.",
        [
            Plot(f"{title}: {said}", plots.lines(rates, ranks, Axis("samples/s", from_zero=True), ideal)),
            Plot(
                f"{title}: efficiency",
                plots.lines(efficiencies, ranks, Axis("efficiency (%)", from_zero=True), whole),
            ),
        ],
        Table(title, ["backend", "ranks", "samples/s (interval)", "ideal (samples/s)", "efficiency (%)"], rows),
    )


def collective_figure(series: list[CollectiveSeries], styles: Styles) -> Figure:
    """Returns bus bandwidth over size, for one operation and number of ranks."""
    network = f", nodes with {series[0].network}" if series[0].network else ""
    title = f"{series[0].operation}, {series[0].num_processes} ranks, {series[0].device}{network}"
    peaks = [(one, max(one.points, key=lambda point: point.busbw)) for one in series]
    said = "; ".join(
        f"{one.name} over {one.transport} up to {number(peak.busbw / _GIB, 3)} GiB/s at {format_size(peak.bytes)}"
        for one, peak in peaks
    )
    drawn = [
        Line(
            f"{one.name}, {one.transport}",
            _style(series, i, styles),
            [point.bytes for point in one.points],
            [point.busbw / _GIB for point in one.points],
        )
        for i, one in enumerate(series)
    ]
    sizes = sorted({point.bytes for one in series for point in one.points})
    every = -(-len(sizes) // 5)
    x = Axis("size", log=True, ticks={num_bytes: format_size(num_bytes) for num_bytes in sizes[::every]})
    y = Axis("busbw (GiB/s)", log=True, ticks=plots.decades(rate for line in drawn for rate in line.y if rate))
    rows = [
        Row(
            [
                Cell(one.name),
                Cell(one.transport),
                Cell(format_size(point.bytes), point.bytes),
                measured(point.median_seconds, 1e6),
                measured(len(point.seconds)),
                measured(point.algbw, 1 / _GIB),
                measured(point.busbw, 1 / _GIB),
            ]
        )
        for one in series
        for point in one.points
    ]
    columns = ["backend", "transport", "size", "median time (µs)", "repetitions", "algbw (GiB/s)", "busbw (GiB/s)"]
    return Figure(
        title,
        f"Bus bandwidth as nccl-tests defines it. Both axes are logarithmic; higher is faster. {said}.",
        [Plot(f"{title}: {said}", plots.lines(drawn, x, y))],
        Table(title, columns, rows),
    )


def _style(series: Sequence[Scaling | CollectiveSeries], index: int, styles: Styles) -> Style:
    """Returns the look of a line, which differs from other lines of the same backend."""
    backend = series[index].backend
    return styles[backend].varied([one.backend for one in series[:index]].count(backend))


def _ideal(scaling: Scaling, num_processes: int) -> float:
    smallest = min(scaling.points, key=lambda point: point.num_processes)
    return smallest.samples_per_second.estimate / smallest.num_processes * num_processes


def _sentence(said: str) -> str:
    return f"{said}." if said else ""


def _named(entrant: Entrant, said: str) -> str:
    note = standing(entrant)
    return f"{entrant.name} ({note}) {said}" if note else f"{entrant.name} {said}"


def _said_of_parts(parts: Breakdown) -> str:
    communication = f"{number(1e3 * parts.communication, 3)} ms of it communication"
    if (most := parts.unresolved.get("communication")) is not None:
        communication = f"no communication that could be told from noise (at most {number(1e3 * most, 2)} ms)"
    waiting = f" and {number(1e3 * parts.resolved('waiting'), 3)} ms waiting" if parts.tells_waiting else ""
    return f"{number(1e3 * parts.total, 3)} ms, {communication}{waiting}"


def _filled(values: Sequence[float], length: int) -> list[float | None]:
    return [*values, *[None] * (length - len(values))]


def _bins(values: Sequence[float], width: int) -> list[Sequence[float]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


def _last(values: Sequence[float | None]) -> str:
    return score(values[-1]) if values else "nothing"


def _reached(curve: Curve) -> str:
    if curve.target is None:
        return ""
    if curve.seconds_to_target is None:
        return ", target not reached"
    return f", target reached after {number(curve.seconds_to_target, 3)} s"


def _coinciding(curves: list[Curve]) -> str:
    """Says which backends have the same curve, because their lines hide each other."""
    same: dict[tuple[float | None, ...], list[str]] = {}
    for curve in curves:
        same.setdefault(tuple(curve.losses), []).append(curve.backend)
    together = [joined(backends) for backends in same.values() if len(backends) > 1]
    return "".join(f"The losses of {backends} are equal in every step. " for backends in together)


def _curve_lines(points: list[_Points], styles: Styles, standings: Standings) -> tuple[list[Line], list[Line]]:
    """Returns the same points over steps and over time."""
    over_steps, over_time = [], []
    for curve, steps, seconds, values in points:
        note = standings.get((curve.group, curve.backend), "")
        name = f"{curve.backend} ({note})" if note else curve.backend
        over_steps.append(Line(name, styles[curve.backend], steps, values))
        over_time.append(Line(name, styles[curve.backend], seconds, values))
    return over_steps, over_time


def _curve_table(
    caption: str,
    what: str,
    points: list[_Points],
    written_as_score: bool = False,
) -> Table:
    written = score if written_as_score else number
    rows = [
        Row([Cell(curve.backend), measured(steps[i]), measured(seconds[i]), measured(values[i], written=written)])
        for curve, steps, seconds, values in points
        for i in _some(len(values))
    ]
    return Table(caption, ["backend", "step", "training time (s)", what], rows)


def _some(length: int) -> list[int]:
    """Returns as many indices as fit into a readable table, always with the last one."""
    every = -(-length // _MAX_ROWS)
    return sorted({*range(every - 1, length, every), length - 1}) if length else []
