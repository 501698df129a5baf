"""The README's figures are those of the race that lies in docs/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compare.report.markdown import headline_table, results_table, seed_table
from compare.report.results import Results
from launch.engines.interface import PROJECT_DIRECTORY
from tests.faults import table

RACE = PROJECT_DIRECTORY / "docs" / "results" / "race-2026-11-21"


def _block(page: str) -> str:
    """The tables between the marks of a page."""
    _, _, block = page.partition("<!-- results: begin -->\n")
    return block.partition("<!-- results: end -->")[0]


def test_the_tables_are_generated_from_the_race() -> None:
    results = Results.model_validate_json((RACE / "results.json").read_bytes())
    readme, page = (PROJECT_DIRECTORY / name for name in ("README.md", "docs/race.md"))
    assert _block(readme.read_text()) == f"{headline_table(results)}\n"
    assert _block(page.read_text()) == f"{results_table(results)}\n\n{seed_table(results)}\n"
    assert f"({RACE.relative_to(PROJECT_DIRECTORY)}/report.md)" in readme.read_text()
    assert results.commands["the race, and with it every figure"] in page.read_text().replace(" \\\n    ", " ")


PAGES = sorted(
    [
        *PROJECT_DIRECTORY.glob("*.md"),
        *PROJECT_DIRECTORY.glob("docs/*.md"),
        *PROJECT_DIRECTORY.glob("docs/results/*.md"),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT_DIRECTORY)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_readme_can_be_read_at_one_sitting() -> None:
    assert len((PROJECT_DIRECTORY / "README.md").read_text().splitlines()) <= 180


def test_the_figures_of_reliability_are_those_of_the_campaigns() -> None:
    page = table.PAGE.read_text()
    assert table.render(page) == page
