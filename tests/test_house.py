"""What the layout promises: short files and functions, and backends whose facts stand in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from backends.registry import BACKENDS
from launch.starters.interface import PROJECT_DIRECTORY

_MAX_LINES_OF_A_FILE = 400
_MAX_LINES_OF_A_FUNCTION = 60
_PACKAGES = ("tasks", "records", "watch", "training", "launch", "parity", "compare", "contract", "engines", "forecast")
_FOLDERS = ("backends", *_PACKAGES, "docker", "docs", "tests")
# What it is about is a backend itself: the reference, and the launcher that has the name of one.
_MAY_NAME_A_BACKEND = {
    "contract/jobs.py": {"horovod", "accelerate"},  # names of modules that a hostile directory holds
    "launch/starters/accelerate.py": {"accelerate"},
    "compare/race/peers/table.py": {"accelerate", "fabric"},  # what Trainer needs, and Fabric's own loop
}


def _found(*patterns: str) -> list[Path]:
    """The files below the project's own folders that match; there need not be a repository."""
    found = {
        path for folder in _FOLDERS for pattern in patterns for path in (PROJECT_DIRECTORY / folder).rglob(pattern)
    }
    return sorted(found)


@pytest.mark.parametrize("path", _found("*.py", "*.sh"), ids=lambda path: str(path.relative_to(PROJECT_DIRECTORY)))
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= _MAX_LINES_OF_A_FILE
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < _MAX_LINES_OF_A_FUNCTION, node.name


@pytest.mark.parametrize(
    "path",
    [path for path in _found("*.py") if path.relative_to(PROJECT_DIRECTORY).parts[0] in _PACKAGES],
    ids=lambda path: str(path.relative_to(PROJECT_DIRECTORY)),
)
def test_no_code_outside_backends_names_one(path: Path) -> None:
    """Not as a value; comments and docstrings may say what a library does, where that is the reason for something."""
    tree = ast.parse(path.read_text())
    allowed = _MAY_NAME_A_BACKEND.get(str(path.relative_to(PROJECT_DIRECTORY)), set())
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not (values & set(BACKENDS)) - allowed
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not modules & {f"backends.{name}" for name in BACKENDS}


def test_scripts_take_the_backends_from_their_files() -> None:
    """launch/run.sh, and what it sources, know no backend by its name."""
    for path in [*(PROJECT_DIRECTORY / "launch").glob("*.sh"), PROJECT_DIRECTORY / "tests" / "run.sh"]:
        code = re.sub(r"(?m)^\s*#.*$", "", path.read_text())
        assert not re.search(rf"\b({'|'.join(BACKENDS)})\b", code.replace("extras=(single", "extras=(")), path


def test_every_package_is_installed() -> None:
    """An editable installation would not miss one that pyproject.toml leaves out."""
    text = (PROJECT_DIRECTORY / "pyproject.toml").read_text()
    listed = re.findall(r'"([\w.]+)"', re.search(r"(?s)\[tool.setuptools\]\npackages = \[(.*?)\]", text)[1])  # type: ignore[index]
    packages = {".".join(path.relative_to(PROJECT_DIRECTORY).parent.parts) for path in _found("__init__.py")}
    assert set(listed) == {name for name in packages if not name.startswith("tests")}
