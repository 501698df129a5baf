"""report.html: everything found, as a page. It is one file that works offline and requests nothing."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from compare.report.drawing import definitions
from compare.report.first_screen import first_screen
from compare.report.sections import beside_the_ranking, details, look_of
from compare.results import Results


def render_html(results: Results) -> str:
    """Renders the report as one HTML page, to be stored in UTF-8."""
    script, styles = read_resource("report.js"), look_of(results)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(read_resource("report.html.j2")).render(
        results=results,
        screen=first_screen(results, styles),
        beside=beside_the_ranking(results),
        details=details(results, styles),
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
