"""The HTML report: what stands in the file, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compare.numbers import format_size, interval, joined, number
from compare.report.html import render_html
from compare.results import Interval, Results
from launch.errors import UsageError
from tests.browser import Visit, chromium
from tests.sample_results import HOSTILE, HOSTILE_TEXTS, empty_results, sample_results


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
    pytest.importorskip("plotly")
    return render_html(sample_results())


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


def test_missing_plotly_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"^report\.html .*pip install 'plotly[^\n]*$"):
        render_html(empty_results())


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
        assert all(comparison.text in said for comparison in group.comparisons)
        assert all(line in said for entrant in group.entrants for line in entrant.failures)
    assert {row.hardware for row in results.seed_table} <= set(outline.texts)


def test_what_comes_from_records_is_text(page: str, outline: Outline) -> None:
    assert outline.texts.count(HOSTILE) >= 5
    assert all(any(text in found for found in outline.texts) for text in HOSTILE_TEXTS)
    assert not outline.all("img")
    assert not outline.all("b")
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    assert all((link["href"] or "").startswith("#") for link in outline.all("a"))
    # Scripts: one a plot, the colours, plotly and ours; only the latter two run.
    num_plots = sum(attributes.get("class") == "plot" for attributes in outline.all("div"))
    kinds = [attributes.get("type") for attributes in outline.all("script")]
    assert kinds == ["application/json"] * (num_plots + 1) + [None, None]


def test_names_in_plots_are_no_markup(outline: Outline) -> None:
    drawings = [json.loads(script) for script in outline.scripts if script.startswith('{"data"')]
    assert drawings
    texts = [text for drawing in drawings for text in _strings(drawing)]
    assert any("&lt;script&gt;" in text for text in texts)
    assert any("&lt;b&gt;mpi&lt;/b&gt;" in text for text in texts)
    assert {tag for text in texts for tag in re.findall(r"<[^>]*>", text)} <= {
        "<br>",
        "<i>",
        "</i>",
        "<extra>",
        "</extra>",
    }


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def test_data_cannot_end_its_script(page: str) -> None:
    data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data
    assert all(json.loads(text) and not set("<>&") & set(text) for text in data)


def test_nothing_may_be_requested(outline: Outline) -> None:
    (policy,) = [meta["content"] for meta in outline.all("meta") if meta.get("http-equiv")]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert re.fullmatch(r"('sha256-[\w+/=]{44}' ?){2}", directives["script-src"])
    assert set(directives) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert directives["style-src"] == "'unsafe-inline'"


def test_every_plot_has_its_text(outline: Outline) -> None:
    figures = outline.all("figure")
    assert len(figures) == 2 * 3 + 2 + 2 + 1
    assert all(figure["role"] == "group" and figure["aria-label"] for figure in figures)
    plots = [attributes for attributes in outline.all("div") if attributes.get("class") == "plot"]
    assert len({plot["aria-label"] for plot in plots}) == len(plots) == 2 * 3 + 4 + 4 + 1
    assert all(plot["role"] == "img" for plot in plots)
    assert len(outline.all("figcaption")) == len(outline.all("details")) == len(figures)
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
    assert re.search(r'<tr class="differs">\s*<th scope="row">bucket size</th>\s*<td>≠ differs</td>', page)


def test_what_was_not_found_is_left_out() -> None:
    pytest.importorskip("plotly")
    outline = Outline(render_html(empty_results()))
    assert not outline.all("figure")
    assert not outline.all("table")
    assert not outline.all("nav")
    assert len(outline.all("section")) == 1


def _without_runs(results: Results) -> Results:
    for group in results.groups:
        group.comparisons.clear()
        for entrant in group.entrants:
            entrant.step_seconds.clear()
            entrant.samples_per_second_of_runs.clear()
            entrant.breakdown = entrant.wire = None
            entrant.settings.clear()
    return results


@pytest.mark.parametrize(
    ("change", "missing", "num_figures"),
    [
        (lambda results: results.model_copy(update={"curves": []}), "training", 9),
        (lambda results: results.model_copy(update={"scaling": []}), "scaling", 9),
        (lambda results: results.model_copy(update={"collectives": []}), "collectives", 10),
        (lambda results: results.model_copy(update={"seed_table": []}), "table", 11),
        (lambda results: results.model_copy(update={"commands": {}}), "commands", 11),
        (_without_runs, None, 5),
    ],
)
def test_a_part_without_data_is_left_out(
    change: Callable[[Results], Results], missing: str | None, num_figures: int
) -> None:
    pytest.importorskip("plotly")
    outline = Outline(render_html(change(sample_results())))
    assert missing not in [attributes.get("id") for attributes in outline.all("h2")]
    assert len(outline.all("figure")) == num_figures


def test_little_is_enough() -> None:
    """One run of one step, no interval anywhere, a training that never took a step."""
    pytest.importorskip("plotly")
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


def test_colours_and_marks_belong_to_a_backend(outline: Outline) -> None:
    names = ("ddp", "horovod", "accelerate (out of lockstep)")
    seen: dict[str, set[tuple[str, str, str]]] = {}
    for script in outline.scripts:
        for trace in json.loads(script)["data"] if script.startswith('{"data"') else []:
            if trace["type"] == "scatter" and trace.get("name") in names:
                look = (trace["line"]["color"], trace["line"]["dash"], trace["marker"]["symbol"])
                seen.setdefault(trace["name"], set()).add(look)
    assert {name: len(looks) for name, looks in seen.items()} == dict.fromkeys(names, 1)
    assert len({look for looks in seen.values() for look in looks}) == 3


def test_many_steps_make_no_large_page(page: str) -> None:
    from compare.report.plots import averaged, bin_size, thinned

    large = render_html(sample_results(steps_a_run=20_000, losses=60_000))
    assert len(large.encode()) < 12e6
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def open_page(**context: Any) -> Visit:
        visits.append(Visit(browser, report, **context))
        return visits[-1]

    yield open_page
    for one in visits:
        one.close()


_PLOTS = """() => [...document.querySelectorAll('.plot')].map((plot) => {
    const box = plot.querySelector('svg.main-svg')?.getBoundingClientRect();
    const frame = plot.getBoundingClientRect();
    const shapes = plot.querySelectorAll('.scatterlayer .trace, .violinlayer .trace, .barlayer .trace');
    const plotted = plot.querySelector('.xy')?.getBoundingClientRect();
    return {
        width: box?.width ?? 0, height: box?.height ?? 0, traces: plot.data?.length ?? 0, drawn: shapes.length,
        area: (plotted?.width ?? 0) * (plotted?.height ?? 0), fits: !box || box.right <= frame.right + 1,
        cut: [...plot.querySelectorAll('text')].filter((text) => {
            const t = text.getBoundingClientRect();
            return t.width && (t.left < frame.left - 1 || t.right > frame.right + 1 || t.top < frame.top - 1
                || t.bottom > frame.bottom + 1);
        }).map((text) => text.textContent),
    };
})"""

# Contrast as WCAG 2 defines it, of every text that shows, against what is painted behind it.
_CONTRAST = """() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => numbers(colour).slice(0, 3).map((c) => c / 255)
        .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if ((numbers(colour)[3] ?? 1) > 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const weak = [];
    let seen = 0;
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.getClientRects().length || element.closest('script, style')) continue;
        seen += 1;
        const style = getComputedStyle(element);
        const a = luminance(element instanceof SVGElement ? style.fill : style.color);
        const b = luminance(behind(element));
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) weak.push(`${contrast.toFixed(2)}: ${element.textContent.trim().slice(0, 40)}`);
    }
    return { seen, weak };
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_page_opens_by_itself_and_draws(visit: Callable[..., Visit], scheme: str, width: int) -> None:
    seen = visit(color_scheme=scheme, viewport={"width": width, "height": 800})
    plots = seen.page.evaluate(_PLOTS)
    assert len(plots) == 2 * 3 + 4 + 4 + 1
    for plot in plots:
        assert plot["traces"] > 0
        assert plot["drawn"] > 0
        assert plot["width"] > min(width, 500) * 0.85
        assert plot["height"] > 150
        assert plot["area"] > 0.4 * plot["width"] * plot["height"]
        assert plot["fits"]
        assert plot["cut"] == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    contrast = seen.page.evaluate(_CONTRAST)
    assert contrast["seen"] > 200
    assert contrast["weak"] == []
    assert seen.page.evaluate("window.executed") is None
    assert seen.complaints == []
    assert seen.requests == [seen.url]


@pytest.mark.browser
def test_wide_tables_scroll_by_themselves(visit: Callable[..., Visit]) -> None:
    seen = visit(viewport={"width": 360, "height": 800})
    widths = seen.page.evaluate("[...document.querySelectorAll('.scroll')].map((s) => [s.scrollWidth, s.clientWidth])")
    assert any(inner > outer for inner, outer in widths)
    assert all(outer <= 360 for _, outer in widths)


@pytest.mark.browser
def test_plots_follow_the_width(visit: Callable[..., Visit]) -> None:
    page = visit(viewport={"width": 1280, "height": 800}).page
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_timeout(500)
    assert all(plot["fits"] and plot["cut"] == [] for plot in page.evaluate(_PLOTS))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    overlaps = page.evaluate("""() => [...document.querySelectorAll('figure')].filter((figure) => {
        const caption = figure.querySelector('figcaption').getBoundingClientRect().top;
        return [...figure.querySelectorAll('svg.main-svg')].some((svg) => svg.getBoundingClientRect().bottom > caption);
    }).length""")
    assert overlaps == 0


@pytest.mark.browser
def test_a_request_would_be_stopped(visit: Callable[..., Visit]) -> None:
    """The page asks for nothing; were something in it to ask, the policy would stand in the way."""
    seen = visit()
    blocked = seen.page.evaluate("""async () => {
        const stopped = [];
        document.addEventListener('securitypolicyviolation', (event) => stopped.push(event.effectiveDirective));
        await fetch('http://127.0.0.1:9/').catch(() => {});
        document.body.insertAdjacentHTML('beforeend', '<img src="http://127.0.0.1:9/a.png"><b onclick="1">x</b>');
        const script = document.createElement('script');
        script.textContent = 'window.executed = true';
        document.body.append(script);
        await new Promise((resolve) => setTimeout(resolve, 200));
        return stopped;
    }""")
    assert sorted(blocked) == ["connect-src", "img-src", "script-src-attr", "script-src-elem"]
    assert seen.page.evaluate("window.executed") is None


@pytest.mark.browser
def test_names_show_as_they_are(visit: Callable[..., Visit]) -> None:
    seen = visit(viewport={"width": 1280, "height": 800})
    names = seen.page.evaluate("[...document.querySelectorAll('.plot .annotation-text')].map((t) => t.textContent)")
    assert HOSTILE in names
    legends = seen.page.evaluate("[...document.querySelectorAll('.plot .legendtext')].map((t) => t.textContent)")
    assert "horovod, <b>mpi</b>" in legends
    assert seen.page.evaluate("document.querySelectorAll('.plot a').length") == 0
    rows = seen.page.evaluate("[...document.querySelectorAll('tbody th')].map((cell) => cell.textContent)")
    assert HOSTILE in rows


@pytest.mark.browser
def test_tables_are_sorted_from_the_keyboard(visit: Callable[..., Visit]) -> None:
    page = visit().page
    table = page.locator("table.sortable", has=page.get_by_text("Measurements, 2 ranks")).first
    heading = table.locator("thead th", has_text="samples/s").first

    def backends() -> list[str]:
        return table.locator("tbody th").all_text_contents()

    assert backends() == ["ddp", "horovod", "accelerate", HOSTILE, "apex"]
    assert heading.get_attribute("aria-sort") is None
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    # By number, not by letter; and whoever is not ranked stays below.
    assert backends() == [HOSTILE, "horovod", "ddp", "accelerate", "apex"]
    page.keyboard.press("Space")
    assert heading.get_attribute("aria-sort") == "descending"
    assert backends()[:3] == ["ddp", "horovod", HOSTILE]
    assert backends()[3:] == ["accelerate", "apex"]
    # 51.12, 65.48 and 167.9 ms: by letter the last would be the first.
    table.locator("thead th button", has_text="median step").click()
    assert backends()[:3] == ["ddp", "horovod", HOSTILE]
    table.locator("thead th button", has_text="backend").click()
    assert heading.get_attribute("aria-sort") is None
    assert backends()[:3] == [HOSTILE, "ddp", "horovod"]


@pytest.mark.browser
def test_plots_follow_the_colour_scheme(visit: Callable[..., Visit]) -> None:
    from playwright.sync_api import expect

    page = visit(color_scheme="light").page
    tick = page.locator(".plot .xtick text").first
    expect(tick).to_have_css("fill", "rgb(26, 26, 26)")
    page.emulate_media(color_scheme="dark")
    expect(tick).to_have_css("fill", "rgb(232, 232, 232)")
    page.emulate_media(color_scheme="dark", media="print")
    expect(tick).to_have_css("fill", "rgb(26, 26, 26)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.browser
def test_plots_fit_on_paper(visit: Callable[..., Visit], tmp_path: Path) -> None:
    from playwright.sync_api import expect

    seen = visit(color_scheme="dark", viewport={"width": 1280, "height": 800})
    seen.page.evaluate("""() => addEventListener('beforeprint', () => {
        const drawn = [...document.querySelectorAll('.plot svg.main-svg')];
        window.printed = drawn.map((svg) => svg.getBoundingClientRect().width);
    })""")
    pdf = seen.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert pdf.startswith(b"%PDF")
    widths = seen.page.evaluate("window.printed")
    # A4 between margins of 14 mm, at 96 dots an inch.
    assert max(widths) <= (210 - 28) / 25.4 * 96
    assert seen.complaints == []
    # And on the screen it is as before.
    expect(seen.page.locator(".plot .xtick text").first).to_have_css("fill", "rgb(232, 232, 232)")


@pytest.mark.browser
def test_page_can_be_used_from_the_keyboard(visit: Callable[..., Visit]) -> None:
    page = visit().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    details = page.locator("figure details").first
    details.locator("summary").focus()
    page.keyboard.press("Enter")
    assert details.locator("table").is_visible()


@pytest.mark.browser
def test_page_is_readable_without_scripts(visit: Callable[..., Visit]) -> None:
    seen = visit(java_script_enabled=False)
    assert seen.page.get_by_role("heading", name="Verdict").is_visible()
    assert seen.page.get_by_role("table").count() >= 8
    assert seen.page.get_by_role("figure").or_(seen.page.get_by_role("group")).count() >= 11
    assert seen.page.locator("th button").count() == 0
