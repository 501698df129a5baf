"""report.html: everything found, as a page. It is one file that works offline and requests nothing."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from compare.report.drawing import definitions
from compare.report.first_screen import FirstScreen, first_screen
from compare.report.page import Section
from compare.report.sections import beside_the_ranking, details, look_of
from compare.results import Results


@dataclass(frozen=True)
class Page:
    """What a page shows: its title and date, a first screen, sections beside it, and details that unfold."""

    title: str
    created_at: str
    screen: FirstScreen
    beside: Sequence[Section] = ()
    details: Sequence[Section] = ()


def render_html(results: Results) -> str:
    """Renders the report as one HTML page, to be stored in UTF-8."""
    styles = look_of(results)
    screen = first_screen(results, styles)
    return render_page(
        Page(results.title, results.created_at, screen, beside_the_ranking(results), details(results, styles))
    )


def render_page(page: Page) -> str:
    """Renders a page in the style of reports, to be stored in UTF-8."""
    script = read_resource("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(read_resource("report.html.j2")).render(
        page=page,
        policy=_policy(script),
        charts_style=read_resource("charts.css"),
        style=read_resource("report.css"),
        definitions=definitions(),
        script=script,
    )


def read_resource(name: str) -> Markup:
    """Reads a file of this package, which goes into a page as it is."""
    return Markup(importlib.resources.files("compare.report").joinpath(name).read_text(encoding="utf-8"))


def _policy(script: str) -> str:
    """Forbids every request, and every script but this one; drawings have styles of their own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
