"""A race as a picture for a page: ``python -m compare.report.picture RESULTS.json > race.svg``.

Each bar is the throughput of a backend on several ranks, with its 95 % interval; a line across the bars is what one
process reaches under the same conditions. The picture follows the colour scheme of the reader.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from compare.numbers import one_line, rate
from compare.report.drawing import Axis, Drawing, Scale
from compare.report.headline import Headline, headlines
from compare.report.html import read_resource
from compare.report.styles import Style, styles_for
from compare.report.words import ranks
from compare.results import Results, read_results

_WIDTH, _MARGIN, _TOP = 800, 24, 70
_AXIS = Axis("samples/s", from_zero=True)
_GAP = 28
_ROW, _BAR, _ABOVE, _BELOW = 40, 20, 46, 46
_PIXELS_OF_A_LETTER = 7.2
# So that the last number of the axis has room beside the one before.
_HEADROOM = 1.06
_STYLE = """
.title { font-size: 17px; font-weight: 600; }
.heading { font-weight: 600; }
.chart .solo { stroke: var(--ink); stroke-width: 2; }
"""


def render_picture(results: Results) -> str:
    """Renders a picture of the race as SVG, one panel for each condition under which one process was timed.

    Raises:
        ValueError: One process was never timed beside several ranks.
    """
    shown = [one for one in headlines(results) if one.rivals]
    if not shown:
        raise ValueError("these results have no backend with several ranks beside one process")
    worlds = sorted({group.num_processes for one in shown for group, _ in one.rivals})
    title = f"Throughput on {' and '.join(map(ranks, worlds))}, and of one process"
    machines = "; ".join(dict.fromkeys(place.machine for place in results.places))
    about = f"{shown[0].alone.global_batch_size} samples a step, {machines}, {results.created_at[:10]}"
    height = _TOP + _ABOVE + _ROW * max(len(one.rivals) for one in shown) + _BELOW
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}">\n<style>\n{}</style>\n<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>\n'
        '<svg class="chart"><text class="title" x="{}" y="36">{}</text><text class="tick" x="{}" y="58">{}. '
        "More is better; whiskers are 95 % intervals of the difference from the bar without.</text>{}</svg>\n</svg>\n"
    ).format(
        *(_WIDTH, height, _WIDTH, height, _said(shown), read_resource("charts.css") + Markup(_STYLE)),
        *(_MARGIN, title, _MARGIN, about, _panels(shown, _bounds(results), with_ranks=len(worlds) > 1)),
    )


# By the key of a group and the name of an entrant: samples a second.
_Bounds = dict[tuple[str, str], tuple[float, float]]


def _bounds(results: Results) -> _Bounds:
    """Returns how well the rate of each entrant is known beside that of its opponent, which has none itself.

    A rate alone is known less well: it drifts with the machine, for all entrants alike.
    """
    return {
        (one.group, one.name): (speed / (1 + one.longer.high), speed / (1 + one.longer.low))
        for standing in reversed(results.standings)  # where one process is in several, the first counts
        for speed in [standing.placings[0].samples_per_second.estimate]
        for one in standing.placings
        if one.longer is not None and one.longer.low is not None and one.longer.high is not None
    }


def _panels(shown: Sequence[Headline], bounds: _Bounds, *, with_ranks: bool) -> Markup:
    """Draws the panels side by side, all with the same axis."""
    styles = styles_for(entrant.name for one in shown for _, entrant in one.rivals)
    rates = [entrant.samples_per_second for one in shown for _, entrant in one.rivals]
    rates += [one.rate for one in shown]
    largest = max([*(one.estimate for one in rates if one is not None), *(high for _, high in bounds.values())])
    scale = Scale(_AXIS, [_HEADROOM * largest])
    width = (_WIDTH - 2 * _MARGIN - (len(shown) - 1) * _GAP) / len(shown)
    panels = Markup("")
    for i, one in enumerate(shown):
        names = [
            f"{entrant.name}, {ranks(group.num_processes)}" if with_ranks else entrant.name
            for group, entrant in one.rivals
        ]
        room = 50 + _PIXELS_OF_A_LETTER * max(map(len, names))
        left = _MARGIN + i * (width + _GAP)
        bars = _bars(one, bounds, scale, styles).placed(left + room, _TOP + _ABOVE, width - room)
        panels += _labels(one, names, left, left + room - 8) + bars
    return panels


def _labels(headline: Headline, names: Sequence[str], left: float, right: float) -> Markup:
    """Writes the condition, and beside each bar its name and number."""
    labels = Markup('<text class="heading" x="{}" y="{}">{}</text>').format(
        left, _TOP + _ABOVE - 14, headline.alone.precision
    )
    for i, (name, (_, entrant)) in enumerate(zip(names, headline.rivals, strict=True)):
        speed, y = entrant.samples_per_second, _TOP + _ABOVE + _ROW * i + _ROW // 2 + 5
        labels += Markup(
            '<text x="{}" y="{}">{}</text><text class="tick" x="{:.1f}" y="{}" text-anchor="end">{}</text>'
        ).format(left, y, name, right, y, "-" if speed is None else rate(speed.estimate))
    return labels


def _bars(headline: Headline, bounds: _Bounds, scale: Scale, styles: dict[str, Style]) -> Drawing:
    """Draws the bars of one condition, and the line of one process."""
    drawing = Drawing(_ROW * len(headline.rivals))
    drawing.x_axis(_AXIS, scale)
    for i, (group, entrant) in enumerate(headline.rivals):
        speed, middle = entrant.samples_per_second, _ROW * i + _ROW / 2
        if speed is not None:
            kind = f"fill c{styles[entrant.name].colour}"
            drawing.rectangle(0, scale.share(speed.estimate), middle - _BAR / 2, _BAR, kind)
            _draw_whisker(drawing, scale, bounds.get((group.key, entrant.name)), middle)
    share = scale.share(headline.rate.estimate)
    drawing.rule(share, -8, drawing.height, "solo")
    drawing.text(f"one process: {rate(headline.rate.estimate)}", share, -14, "name", "end" if share > 0.5 else "start")
    return drawing


def _draw_whisker(drawing: Drawing, scale: Scale, bounds: tuple[float, float] | None, middle: float) -> None:
    if bounds is not None:
        drawing.line(scale.share(bounds[0]), scale.share(bounds[1]), middle, "edge")
        for end in bounds:
            drawing.rule(scale.share(end), middle - 5, middle + 5, "edge")


def _said(shown: Sequence[Headline]) -> str:
    """Says what the picture shows."""
    sentences = []
    for one in shown:
        rivals = ", ".join(
            f"{entrant.name} on {ranks(group.num_processes)} {rate(entrant.samples_per_second.estimate)}"
            for group, entrant in one.rivals
            if entrant.samples_per_second is not None
        )
        sentences.append(f"{one.alone.precision}: one process {rate(one.rate.estimate)} samples/s, {rivals}.")
    return " ".join(sentences)


def main(arguments: list[str]) -> int:
    """Prints the picture of a results.json; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m compare.report.picture RESULTS.json > PICTURE.svg", file=sys.stderr)
        return 2
    try:
        picture = render_picture(read_results(Path(arguments[0])))
    except (OSError, ValueError) as error:
        print(f"lockstep: {arguments[0]}: cannot be drawn ({one_line(str(error))[:200]})", file=sys.stderr)
        return 2
    print(picture, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
