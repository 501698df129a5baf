"""The tables of the report in Markdown: columns that older results have no figures for are left out."""

from __future__ import annotations

from compare.report.markdown import breakdown_table, results_table
from compare.report.tables import COVERED, CPU_TIME
from tests.sample_results import sample_results


def _rows(table: str) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the rows of a table."""
    headings, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    return headings, rows


def test_a_step_is_shown_with_its_cpu_time() -> None:
    results = sample_results()
    assert CPU_TIME not in results_table(results)
    results.groups[1].entrants[0].mean_step_cpu_seconds = 0.0876
    headings, rows = _rows(results_table(results))
    column, backend = headings.index(CPU_TIME), headings.index("backend")
    assert [row[backend] for row in rows if row[column] == "87.6"] == ["ddp"]
    assert {row[column] for row in rows if row[backend] in ("single", "horovod")} == {"-"}


def test_the_parts_of_a_step_are_shown_with_what_they_cover() -> None:
    results = sample_results()
    assert COVERED not in breakdown_table(results)
    parts = results.groups[1].entrants[0].breakdown
    assert parts is not None
    parts.covered = 0.992
    headings, rows = _rows(breakdown_table(results))
    column, backend = headings.index(COVERED), headings.index("backend")
    assert [row[backend] for row in rows if row[column] == "99.2"] == ["ddp"]
    assert {row[column] for row in rows if row[backend] in ("single", "horovod")} == {"-"}
