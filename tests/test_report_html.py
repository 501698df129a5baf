"""The HTML report: what is in the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from compare.numbers import NOTHING, format_size, interval, joined, longer, number, points
from compare.report.drawing import Axis, Scale
from compare.report.html import render_html
from compare.report.markdown import results_table
from compare.report.tables import measurement_table
from compare.results import Interval, Results
from tests.sample_results import HOSTILE_TEXTS, empty_results, sample_results
from tests.sample_standings import HOSTILE


class Outline(HTMLParser):
    """The elements of a page with the text in each; scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in_script else self.texts).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(sample_results())


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(618.23), "618.2"),
        (number(1234567.0), "1,234,567"),
        (number(0.051), "0.05100"),
        (number(3e-9), "3e-09"),
        (number(0.0), "0"),
        (number(8), "8"),
        (number(None), "–"),  # noqa: RUF001
        (format_size(1024), "1 KiB"),
        (format_size(1.5 * 2**20), "1.50 MiB"),
        (format_size(0), "0 B"),
        (interval(Interval(estimate=2.0, low=1.0, high=3.0), 10), "20.00 (10.00 to 30.00)"),
        (interval(Interval(estimate=2.0)), "2.000"),
        (points(0.0131), "1.3"),
        (points(0.307), "31"),
        (longer(Interval(estimate=0.307, low=0.29, high=0.33)), "+31 % [+29, +33]"),
        (longer(Interval(estimate=-0.0002, low=-0.004, high=0.1)), "0.0 % [-0.4, +10]"),
        (longer(Interval(estimate=0.05)), "+5.0 %"),
        (longer(None), "–"),  # noqa: RUF001
        (joined(["a", "b", "c"]), "a, b and c"),
        (joined(["a"]), "a"),
    ],
)
def test_numbers_are_for_people(written: str, expected: str) -> None:
    assert written == expected


def test_equal_results_give_equal_pages(page: str) -> None:
    assert render_html(sample_results()) == page


def test_everything_found_is_said_in_plain_html(outline: Outline) -> None:
    results = sample_results()
    said = "\n".join(outline.texts)
    for sentence in [*results.verdict, *results.problems, *results.commands, *results.commands.values()]:
        assert sentence in said
    for group in results.groups:
        assert group.group.key in said
        assert all(longer(comparison.slowdown) in said for comparison in group.comparisons)
        assert all(line in said for entrant in group.entrants for line in entrant.failures)
    assert {row.hardware for row in results.seed_table} <= set(outline.texts)


def test_what_comes_from_records_is_text(page: str, outline: Outline) -> None:
    assert outline.texts.count(HOSTILE) >= 5
    assert all(any(text in found for found in outline.texts) for text in HOSTILE_TEXTS)
    assert not outline.all("img")
    assert not outline.all("b")
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    assert all((link["href"] or "").startswith("#") for link in outline.all("a"))
    assert outline.all("script") == [{}]


def test_names_in_plots_are_no_markup(page: str) -> None:
    drawings = _drawings(page)
    assert len(drawings) == 2 + 2 * 3 + 4 + 4 + 1
    text = "\n".join(drawings)
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;mpi&lt;/b&gt;" in text
    known = {"svg", "g", "line", "rect", "circle", "path", "use", "text", "title", "ul", "li", "span"}
    assert set(re.findall(r"<(\w+)", text)) <= known


def _drawings(page: str) -> list[str]:
    return re.findall(r'<div class="plot"[^>]*>(.*?)</div>', page, re.DOTALL)


def test_every_mark_says_its_number_to_the_pointer(page: str) -> None:
    """What a pointer rests on has a text: marks and bars by themselves, points between marks by what lies over them."""
    for drawing in _drawings(page):
        marks = re.findall(r'<g class="mark [^"]*">(<title>.+?</title>)?', drawing)
        assert all(marks)
        assert len(re.findall(r"<title>[^<]*\d", drawing)) >= 2
    losses = re.search(r'aria-label="Loss over steps[^"]*">(.*?)</div>', page, re.DOTALL)
    assert losses is not None
    assert losses[1].count("<title>ddp: ") == 100


def test_nothing_may_be_requested(outline: Outline) -> None:
    (policy,) = [meta["content"] for meta in outline.all("meta") if meta.get("http-equiv")]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]{44}'", directives["script-src"])
    assert set(directives) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert directives["style-src"] == "'unsafe-inline'"


def test_every_plot_has_its_text(outline: Outline) -> None:
    figures = outline.all("figure")
    assert len(figures) == 2 + 2 * 3 + 2 + 2 + 1
    assert all(figure["role"] == "group" and figure["aria-label"] for figure in figures)
    plots = [attributes for attributes in outline.all("div") if attributes.get("class") == "plot"]
    assert len({plot["aria-label"] for plot in plots}) == len(plots) == 2 + 2 * 3 + 4 + 4 + 1
    assert all(plot["role"] == "img" for plot in plots)
    assert len(outline.all("figcaption")) == len(figures)
    assert len(outline.all("caption")) == len(outline.all("table"))


def test_headings_are_in_order(outline: Outline) -> None:
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[:2] == [1, 2]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {f"#{name}" for name in ids} >= {link["href"] for link in outline.all("a")}


def test_rows_that_are_not_ranked_are_marked(page: str) -> None:
    assert re.search(r'<tr class="unranked">\s*<th scope="row">accelerate</th>\s*<td>⚠ out of lockstep</td>', page)
    assert re.search(
        r'<th scope="row">accelerate</th>\s*<td>⚠ out of lockstep</td>\s*<td class="number" data-value="600">', page
    )
    assert re.search(r'<tr class="failed">\s*<th scope="row">apex</th>\s*<td>✗ failed</td>', page)
    assert re.search(r'<tr class="differs">\s*<th scope="row">bucket size</th>\s*<td>25 MiB</td>\s*<td>ddp', page)
    assert re.search(r'<th scope="row">asked: bucket_cap_mb</th>\s*<td>25</td>', page)
    assert re.search(r'<th scope="row">the rank with most to compute, relative to the mean</th>\s*<td>1.02</td>', page)
    assert re.search(rf'<th scope="row">memory allocator</th>\s*<td>{NOTHING}</td>', page)


def test_what_was_not_found_is_left_out() -> None:
    outline = Outline(render_html(empty_results()))
    assert not outline.all("figure")
    assert not outline.all("table")
    assert not outline.all("details")
    assert len(outline.all("section")) == 1


def _without_runs(results: Results) -> Results:
    for group in results.groups:
        group.comparisons.clear()
        for entrant in group.entrants:
            entrant.step_seconds.clear()
            entrant.samples_per_second_of_runs.clear()
            entrant.breakdown = entrant.wire = None
            entrant.settings.clear()
    results.standings.clear()
    return results


@pytest.mark.parametrize(
    ("change", "missing", "num_figures"),
    [
        (lambda results: results.model_copy(update={"curves": []}), "training", 11),
        (lambda results: results.model_copy(update={"scaling": []}), "scaling", 11),
        (lambda results: results.model_copy(update={"collectives": []}), "collectives", 12),
        (lambda results: results.model_copy(update={"seed_table": []}), "table", 13),
        (lambda results: results.model_copy(update={"commands": {}}), "commands", 13),
        (_without_runs, None, 5),
    ],
)
def test_a_part_without_data_is_left_out(
    change: Callable[[Results], Results], missing: str | None, num_figures: int
) -> None:
    outline = Outline(render_html(change(sample_results())))
    assert missing not in [attributes.get("id") for attributes in outline.all("h3")]
    assert len(outline.all("figure")) == num_figures


def test_little_is_enough() -> None:
    """One run of one step, no interval anywhere, a training that never took a step."""
    results = sample_results(steps_a_run=1, losses=6)
    for entrant in results.groups[0].entrants:
        entrant.samples_per_second = None
        entrant.median_step_seconds = entrant.p95_step_seconds = None
        entrant.step_seconds = [[0.05]]
        entrant.num_runs = 1
        entrant.ranked = False
    for series in results.scaling:
        for point in series.points:
            point.samples_per_second = Interval(estimate=point.samples_per_second.estimate)
    empty = results.curves[0]
    for values in (empty.steps, empty.losses, empty.seconds, empty.evaluation_steps, empty.evaluation_seconds):
        values.clear()
    empty.metrics = {}
    said = "\n".join(Outline(render_html(results)).texts)
    assert "not ranked" in said
    assert not re.search(r"None|nan|  +\.|: \.", said)


def test_colours_and_marks_belong_to_a_backend(page: str) -> None:
    names = ("ddp", "horovod", "accelerate (out of lockstep)")
    seen: dict[str, set[tuple[str, ...]]] = {}
    sample = r'<g class="(c\d)"><line class="line (d\d)".*?href="#(small\d)".*?<span>(.*?)</span>'
    for *look, name in re.findall(sample, page):
        seen.setdefault(name, set()).add(tuple(look))
    assert all(len(seen[name]) == 1 for name in names)
    looks = [look for name in names for look in seen[name]]
    assert all(len({look[part] for look in looks}) == 3 for part in range(3))


def test_an_axis_has_round_ticks_within_its_ends() -> None:
    assert list(Scale(Axis("x", from_zero=True), [3.0, 57.0]).ticks.values()) == ["0", "10", "20", "30", "40", "50"]
    assert list(Scale(Axis("x"), [0.031, 0.034]).ticks.values()) == ["0.031", "0.032", "0.033", "0.034"]
    assert all(0 <= scale.share(tick) <= 1 for scale in [Scale(Axis("x"), [7.0])] for tick in scale.ticks)
    assert Scale(Axis("x"), [None]).ticks
    log = Scale(Axis("x", log=True, ticks={1: "1", 10: "10", 100: "100", 1000: "1000"}), [1.0, 100.0])
    assert list(log.ticks.values()) == ["1", "10", "100"]
    assert log.share(10) == pytest.approx(0.5)


def test_many_steps_make_no_large_page(page: str) -> None:
    from compare.report.plots import averaged, bin_size, thinned

    large = render_html(sample_results(steps_a_run=20_000, losses=60_000))
    assert len(large.encode()) < 1.5e6
    assert len(large) - len(page) < 1e6
    values = [float(i * i) for i in range(100_000)]
    thin = thinned(values)
    assert (len(thin), thin[0], thin[1000], thin[-1]) == (
        2000,
        values[0],
        pytest.approx(values[50_025], 1e-3),
        values[-1],
    )
    assert averaged([1.0, 3.0, None, 5.0, 7.0], 2) == [2.0, None, 7.0]
    assert (bin_size(100), bin_size(101)) == (1, 2)


def test_the_first_step_of_two_starts_is_their_middle_in_every_form() -> None:
    results = sample_results()
    group = results.groups[1]
    group.entrants[0].seconds_to_first_step = [2.0, 4.0]
    table = measurement_table(group)
    assert table.rows[0].cells[table.columns.index("first step after (s)")].value == 3.0
    lines = [[cell.strip() for cell in line.split("|")] for line in results_table(results).splitlines()]
    (row,) = [line for line in lines if line[1] == "2" and line[4] == "ddp"]
    assert row[lines[0].index("first step (s)")] == "3.0"
