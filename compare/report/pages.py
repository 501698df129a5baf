"""The files of a report: report.html, report.md, results.json and steps.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import rich.table
from rich.console import Console
from rich.text import Text

from compare.report.runs import Run
from compare.results import RESULTS_NAME, Results, read_results
from launch.errors import UsageError
from records.files import write_atomically

_HTML_NAME, _MARKDOWN_NAME, STEPS_NAME = "report.html", "report.md", "steps.csv"
_NUM_COLUMNS = 3
_PACKAGES = ("jinja2", "psutil", "scipy")


def require_packages() -> None:
    """Makes sure that a report can be made.

    Raises:
        UsageError: A package is missing; the text says what to install.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(
                f"{package} is missing; run pip install '.[compare]' in the repository, "
                "or use launch/run.sh, which does"
            )


def require_room(directory: Path) -> None:
    """Makes sure that no report is in the directory.

    Raises:
        UsageError: There is one.
    """
    for name in (RESULTS_NAME, _MARKDOWN_NAME, _HTML_NAME, STEPS_NAME):
        if (directory / name).exists():
            raise UsageError(f"--output-dir {directory}: holds {name} already; add --overwrite or choose another")


def render(results: Results, runs: Sequence[Run] = ()) -> dict[str, str]:
    """Returns the texts of the files by their names.

    Args:
        results: What was found.
        runs: What it was found from, as far as it is known.
    """
    from compare.report.html import render_html
    from compare.report.markdown import render_markdown
    from compare.report.tidy import steps_csv

    pages = {
        RESULTS_NAME: results.model_dump_json() + "\n",
        _MARKDOWN_NAME: render_markdown(results),
        _HTML_NAME: render_html(results),
    }
    return pages | ({STEPS_NAME: steps_csv(runs)} if runs else {})


def write_pages(pages: Mapping[str, str], results: Results, directory: Path, terminal: Console) -> None:
    """Writes the files of a report, and shows its first screen.

    Raises:
        UsageError: The directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if pages and STEPS_NAME not in pages and not _is_same_race(results, directory / RESULTS_NAME):
            (directory / STEPS_NAME).unlink(missing_ok=True)  # the steps of another report
        for name, text in pages.items():
            write_atomically(directory / name, text)
    except OSError as error:
        raise UsageError(f"--output-dir {directory}: {error.strerror}; choose another directory") from error
    _show(results, terminal)
    _list(results.problems, terminal)
    others = ", ".join(name for name in (_MARKDOWN_NAME, RESULTS_NAME, STEPS_NAME) if name in pages)
    terminal.print(f"report: {directory / _HTML_NAME} (also {others})")


def _is_same_race(results: Results, earlier: Path) -> bool:
    """Whether results that are about to be replaced have the same groups."""
    try:
        return read_results(earlier).groups == results.groups
    except (OSError, ValueError):
        return False


def _show(results: Results, terminal: Console) -> None:
    """Prints what the page shows first: verdict, numbers, and how far they can be trusted."""
    from compare.report.bare import adapter_cost_lines
    from compare.report.first_screen import conditions_line, first_screen
    from compare.report.sections import look_of

    screen = first_screen(results, look_of(results))
    for sentence in screen.warnings:
        terminal.print(f"WARNING: {sentence}", style="bold red", markup=False)
    for sentence in screen.verdict:
        terminal.print(sentence, markup=False)
    for table in screen.tables[:1]:  # with as many columns as fit into a narrow terminal
        shown = rich.table.Table(title=Text(table.caption), title_justify="left", box=None, pad_edge=False)
        for i, column in enumerate(table.columns[:_NUM_COLUMNS]):
            longest = max(len(row.cells[i].text) for row in table.rows)
            shown.add_column(Text(column), justify="right" if i else "left", min_width=longest if i else None)
        for row in table.rows:
            shown.add_row(*(Text(cell.text) for cell in row.cells[:_NUM_COLUMNS]))
        terminal.print()
        terminal.print(shown)
    terminal.print()
    if screen.lost:
        terminal.print(screen.lost, markup=False)
    for standing in results.standings[1:]:
        terminal.print(conditions_line(standing), markup=False)
    for line in adapter_cost_lines(results.adapter_costs):
        terminal.print(line, markup=False)
    for ground in screen.grounds:
        terminal.print(f"{ground.question}: {ground.answer}", markup=False)


def _list(problems: Sequence[str], terminal: Console) -> None:
    """Prints what could not be used or compared, which the verdict says to be below."""
    if problems:
        terminal.print("\nWhat could not be used or compared:")
    for problem in problems:
        terminal.print(Text(f"- {problem}"))
