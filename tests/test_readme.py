"""The pages of the documentation: figures come from their results, links and commands exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.registry import BACKENDS
from compare.report.markdown import headline_table, results_table, seed_table
from compare.results import Results
from engines.registry import ENGINES, find_engine
from launch.cli import COMMANDS
from launch.starters.interface import PROJECT_DIRECTORY
from tests.faults import table

RACE = PROJECT_DIRECTORY / "docs" / "results" / "race-2026-11-26"


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


def _name(page: Path) -> str:
    return str(page.relative_to(PROJECT_DIRECTORY))


PAGES = sorted(
    [
        *PROJECT_DIRECTORY.glob("*.md"),
        *PROJECT_DIRECTORY.glob("docs/*.md"),
        *PROJECT_DIRECTORY.glob("docs/results/*.md"),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in _headings(target), link


def _headings(page: Path) -> list[str]:
    """The names by which GitHub links to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_readme_can_be_read_at_one_sitting() -> None:
    assert len((PROJECT_DIRECTORY / "README.md").read_text().splitlines()) <= 180


def test_the_figures_of_reliability_are_those_of_the_campaigns() -> None:
    page = table.PAGE.read_text()
    assert table.render(page) == page


def _code(page: Path) -> list[str]:
    """The lines of a page's code blocks, those that end with a backslash joined with the next, without comments."""
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0] for line in lines]


def _spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


OPTION = re.compile(r"--[a-z][a-z-]+")
OF_TASKS = {
    *("--num-train-samples", "--num-validation-samples", "--hidden-size", "--turns", "--num-points"),
    *("--data-dir", "--dtype", "--samples-per-second"),
}
OF_SCRIPTS = {"--docker", "--all", "--ci"}  # of launch/run.sh and of tests/run.sh
OF_ENGINES = {"--engine", "--dry-run"}
OF_OTHER_PROGRAMS = {"--gloo", "--cpu", "--multi", "--num", "--shm-size", "--signal"}
PACKAGES = "backends|compare|contract|engines|forecast|launch|records|tasks|tests|training|watch"


def _known_options() -> set[str]:
    texts = (PROJECT_DIRECTORY / "docs" / "help").glob("*.txt")
    known = OF_TASKS | OF_SCRIPTS | OF_ENGINES | {word for text in texts for word in OPTION.findall(text.read_text())}
    return known | {
        f"--{field}".replace("_", "-") for name in ENGINES for field in find_engine(name).Settings.model_fields
    }


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=_name)
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    known = _known_options()
    for line in [*_code(page), *_spans(page)]:
        for path in re.findall(r"(?:^|\s)((?:launch|tests|docker|docs|\.ci)/[\w./-]+)", line):
            assert "yours" in path or (PROJECT_DIRECTORY / path).exists(), line
        for module in re.findall(rf"python -m ((?:{PACKAGES})[\w.]*)", line):
            assert find_spec(module) is not None, line
        command = re.search(r"launch/run\.sh (\S+)(.*)", line)
        if command is not None:
            name, options = command.groups()
            assert name in {*BACKENDS, *COMMANDS, "BACKEND", "yours"} or ":" in name or name.startswith("-"), line
            assert set(OPTION.findall(options)) <= known, line


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_options_that_a_page_speaks_of_are_there(page: Path) -> None:
    named = {match[0] for span in _spans(page) if (match := OPTION.match(span))}
    assert named - OF_OTHER_PROGRAMS <= _known_options()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_names_no_path_of_a_machine(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|root|home|Users)/", page.read_text()) == []
