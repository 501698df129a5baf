"""The HTML report: what a browser makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compare.report.html import render_html
from launch.starters.interface import PROJECT_DIRECTORY
from tests.browser import Visit, chromium
from tests.sample_results import disturbed_results, sample_results
from tests.sample_standings import HOSTILE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(sample_results()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disturbed") / "report.html"
    path.write_text(render_html(disturbed_results()), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def open_page(*, path: Path = report, unfolded: bool = True, **context: Any) -> Visit:
        visits.append(Visit(browser, path, **context))
        if unfolded:
            visits[-1].page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        return visits[-1]

    yield open_page
    for one in visits:
        one.close()


_PLOTS = """() => [...document.querySelectorAll('.plot')].map((plot) => {
    const frame = plot.getBoundingClientRect();
    const drawn = [...plot.querySelectorAll('.mark')].filter((mark) => {
        const box = mark.getBoundingClientRect();
        return (box.width > 0 || box.height > 0) && box.left >= frame.left - 1 && box.right <= frame.right + 1;
    });
    const chart = plot.querySelector(':scope > svg.chart').getBoundingClientRect();
    return {
        width: frame.width, height: frame.height, drawn: drawn.length,
        marks: plot.querySelectorAll('.mark').length, area: chart.width * chart.height,
        fits: chart.right <= frame.right + 1,
        cut: [...plot.querySelectorAll('text, .legend span')].filter((text) => {
            const t = text.getBoundingClientRect();
            return t.width && (t.left < frame.left - 1 || t.right > frame.right + 1 || t.top < frame.top - 1
                || t.bottom > frame.bottom + 1);
        }).map((text) => text.textContent),
        collisions: [...plot.querySelectorAll(':scope > svg.chart text')].filter((text, i, texts) => {
            const t = text.getBoundingClientRect();
            return texts.slice(i + 1).some((other) => {
                const o = other.getBoundingClientRect();
                return t.left < o.right && o.left < t.right && t.top < o.bottom - 1 && o.top < t.bottom - 1;
            });
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
    assert len(plots) == 2 + 2 * 3 + 4 + 4 + 1
    for plot in plots:
        assert plot["drawn"] == plot["marks"] > 0
        assert plot["width"] > min(width, 500) * 0.85
        assert plot["height"] > 150
        assert plot["area"] > 0.4 * plot["width"] * plot["height"]
        assert plot["fits"]
        assert plot["cut"] == []
        assert plot["collisions"] == []
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
    overlaps = page.evaluate("""() => [...document.querySelectorAll('.details figure')].filter((figure) => {
        const caption = figure.querySelector('figcaption').getBoundingClientRect().top;
        return [...figure.querySelectorAll('svg.chart')].some((svg) => svg.getBoundingClientRect().bottom > caption);
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
        document.body.insertAdjacentHTML('beforeend', '<img src="http://127.0.0.1:9/a.png">');
        document.body.insertAdjacentHTML('beforeend', '<b onclick="window.executed = true">x</b>');
        document.body.lastElementChild.click();
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
    names = seen.page.evaluate("[...document.querySelectorAll('.plot text.name')].map((t) => t.textContent)")
    assert HOSTILE in names
    legends = seen.page.evaluate("[...document.querySelectorAll('.plot .legend span')].map((t) => t.textContent)")
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

    assert backends() == ["ddp", "horovod", "accelerate", HOSTILE, "apex", "ddp #2"]
    assert heading.get_attribute("aria-sort") is None
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    # By number, not by letter; and whoever is not ranked stays below.
    assert backends() == [HOSTILE, "horovod", "ddp #2", "ddp", "accelerate", "apex"]
    page.keyboard.press("Space")
    assert heading.get_attribute("aria-sort") == "descending"
    assert backends() == ["ddp", "ddp #2", "horovod", HOSTILE, "accelerate", "apex"]
    # 51.12, 65.48 and 167.9 ms: by letter the last would be the first.
    table.locator("thead th button", has_text="median step").click()
    assert backends()[:4] == ["ddp #2", "ddp", "horovod", HOSTILE]
    table.locator("thead th button", has_text="backend").click()
    assert heading.get_attribute("aria-sort") is None
    assert backends()[:4] == [HOSTILE, "ddp", "ddp #2", "horovod"]


@pytest.mark.browser
def test_plots_follow_the_colour_scheme(visit: Callable[..., Visit]) -> None:
    from playwright.sync_api import expect

    page = visit(color_scheme="light").page
    tick = page.locator(".plot .tick").first
    expect(tick).to_have_css("fill", "rgb(89, 89, 89)")
    page.emulate_media(color_scheme="dark")
    expect(tick).to_have_css("fill", "rgb(180, 184, 191)")
    page.emulate_media(color_scheme="dark", media="print")
    expect(tick).to_have_css("fill", "rgb(89, 89, 89)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.browser
def test_plots_fit_on_paper(visit: Callable[..., Visit], tmp_path: Path) -> None:
    from playwright.sync_api import expect

    seen = visit(color_scheme="dark", viewport={"width": 1280, "height": 800})
    pdf = seen.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert pdf.startswith(b"%PDF")
    # A4 between margins of 14 mm, at 96 dots an inch.
    seen.page.emulate_media(media="print", color_scheme="dark")
    seen.page.set_viewport_size({"width": int((210 - 28) / 25.4 * 96), "height": 1000})
    assert [plot["cut"] for plot in seen.page.evaluate(_PLOTS) if plot["cut"] or not plot["fits"]] == []
    seen.page.emulate_media(media="screen", color_scheme="dark")
    assert seen.complaints == []
    # And on the screen it is as before.
    expect(seen.page.locator(".plot .tick").first).to_have_css("fill", "rgb(180, 184, 191)")


@pytest.mark.browser
def test_a_mark_says_its_number_to_the_pointer(visit: Callable[..., Visit]) -> None:
    """The browser shows the title of what is topmost under the pointer, or of what that is in."""
    page = visit(viewport={"width": 1280, "height": 800}).page
    found = page.evaluate("""() => {
        const marks = [...document.querySelectorAll('.plot .mark:has(title)')];
        return marks.map((mark) => {
            mark.scrollIntoView({ block: 'center', behavior: 'instant' });
            const box = mark.getBoundingClientRect();
            const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
            return top?.closest(':has(> title)')?.querySelector(':scope > title').textContent ?? null;
        });
    }""")
    assert len(found) > 100
    # Marks may hide each other, but what is on top is always one that has a text.
    assert all(found)


@pytest.mark.browser
def test_page_can_be_used_from_the_keyboard(visit: Callable[..., Visit]) -> None:
    page = visit(unfolded=False).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    details = page.locator(".details > details").first
    assert not details.locator("table").is_visible()
    details.locator("summary").focus()
    page.keyboard.press("Enter")
    assert details.locator("table").is_visible()
    every = page.get_by_role("button", name="Unfold all")
    every.focus()
    page.keyboard.press("Enter")
    assert page.locator(".details details:not([open])").count() == 0
    page.get_by_role("button", name="Fold all").press("Space")
    assert page.locator(".details details[open]").count() == 0


@pytest.mark.browser
def test_a_link_unfolds_what_it_leads_to(visit: Callable[..., Visit]) -> None:
    page = visit(unfolded=False).page
    page.evaluate("location.hash = 'group-2'")
    page.wait_for_timeout(200)
    assert page.locator("#group-2").is_visible()
    assert page.get_by_text("Measurements, 2 ranks").first.is_visible()


@pytest.mark.browser
@pytest.mark.parametrize("width", [420, 1300])
def test_the_page_is_short_until_it_is_unfolded(visit: Callable[..., Visit], width: int) -> None:
    page = visit(unfolded=False, viewport={"width": width, "height": 900}).page
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot:visible").count() == 2
    assert page.locator("details[open]").count() == 0
    # The verdict can be read without scrolling.
    assert page.evaluate("document.querySelector('.verdict p').getBoundingClientRect().bottom") < 900


@pytest.mark.browser
def test_reports_of_real_races_are_short_until_they_are_unfolded(browser: Any) -> None:
    reports = sorted((PROJECT_DIRECTORY / "docs" / "results").glob("race-*/report.html"))
    assert reports
    heights = {}
    for path in reports:
        one = Visit(browser, path)
        for width in (420, 1300):
            one.page.set_viewport_size({"width": width, "height": 900})
            heights[path.parent.name, width] = one.page.evaluate("document.documentElement.scrollHeight")
        one.close()
    assert {name: height for name, height in heights.items() if height >= 6000} == {}


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_disturbed_race_is_red_before_anything_else(
    visit: Callable[..., Visit], disturbed: Path, scheme: str
) -> None:
    page = visit(path=disturbed, unfolded=False, color_scheme=scheme).page
    banner = page.get_by_role("region", name="Warning")
    red, green, blue = page.evaluate(
        "(e) => getComputedStyle(e).borderTopColor.match(/\\d+/g).map(Number)", banner.element_handle()
    )
    assert red > 150
    assert red > 1.5 * max(green, blue)
    assert banner.bounding_box()["y"] < page.locator(".verdict").bounding_box()["y"]
    assert page.evaluate(_CONTRAST)["weak"] == []


@pytest.mark.browser
def test_what_is_folded_is_not_printed(visit: Callable[..., Visit]) -> None:
    page = visit(unfolded=False).page
    page.emulate_media(media="print")
    assert page.locator("summary:visible").count() == 0
    assert page.locator(".verdict").is_visible()
    assert page.locator(".plot:visible").count() == 2


@pytest.mark.browser
def test_page_is_readable_without_scripts(visit: Callable[..., Visit]) -> None:
    seen = visit(java_script_enabled=False)
    assert seen.page.get_by_role("heading", name="Verdict").is_visible()
    assert seen.page.locator("table").count() >= 8
    assert all(plot["drawn"] == plot["marks"] > 0 for plot in seen.page.evaluate(_PLOTS))
    assert seen.page.get_by_role("figure").or_(seen.page.get_by_role("group")).count() >= 11
    assert seen.page.locator("th button").count() == 0
