"""report.html: everything found, for looking at. One file that works offline and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import importlib.util
import json
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from compare.results import Results
from launch.errors import UsageError


def render_html(results: Results) -> str:
    """Renders the report as one HTML page, which is to be stored in UTF-8.

    Raises:
        UsageError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("report.html is drawn with plotly, which is not installed; pip install 'plotly>=7,<8'")
    # Importing plotly takes a second, and nothing else needs it.
    from plotly.offline import get_plotlyjs

    from compare.report.plots import DARK
    from compare.report.sections import sections

    scripts = [get_plotlyjs(), _resource("report.js")]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["embedded"] = _embedded
    return environment.from_string(_resource("report.html.j2")).render(
        results=results,
        sections=sections(results),
        policy=_policy(scripts),
        style=Markup(_resource("report.css")),
        scripts=[Markup(script) for script in scripts],
        dark=DARK,
    )


def _resource(name: str) -> str:
    return importlib.resources.files("compare.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """Forbids every request, and every script but these.

    Styles cannot be listed likewise: plotly sets them on what it draws.
    """
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _embedded(value: Any) -> Markup:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment."""
    text = json.dumps(value.to_plotly_json() if hasattr(value, "to_plotly_json") else value, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
