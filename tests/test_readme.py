"""The README's figures are those of the race that lies in docs/results."""

from __future__ import annotations

from compare.report_markdown import results_table, seed_table
from compare.results import Results
from launch.engines import PROJECT_DIRECTORY
from tests.faults import table

RACE = PROJECT_DIRECTORY / "docs" / "results" / "race-2026-11-21"


def test_the_tables_are_generated_from_the_race() -> None:
    results = Results.model_validate_json((RACE / "results.json").read_bytes())
    readme = (PROJECT_DIRECTORY / "README.md").read_text()
    _, _, block = readme.partition("<!-- results: begin -->\n")
    assert block.partition("<!-- results: end -->")[0] == f"{results_table(results)}\n\n{seed_table(results)}\n"
    assert f"({RACE.relative_to(PROJECT_DIRECTORY)}/report.md)" in readme
    assert results.commands["the race, and with it every figure"] in readme.replace(" \\\n    ", " ")


def test_the_figures_of_reliability_are_those_of_the_campaigns() -> None:
    page = table.PAGE.read_text()
    assert table.render(page) == page
