"""What a machine lacks: tests that need it are skipped there, and fail where it is required."""

from __future__ import annotations

import re

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import require, require_module


def test_what_is_required_may_not_be_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "single,mount")
    with pytest.raises(pytest.skip.Exception, match="namespaces: not root"):
        require("namespaces", "not root")
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "single,namespaces")
    with pytest.raises(pytest.fail.Exception, match="namespaces is required here: not root"):
        require("namespaces", "not root")
    require("namespaces", None)


def test_a_package_that_is_required_may_not_be_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "no_such_package.part"
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "namespaces")
    with pytest.raises(pytest.skip.Exception, match="no_such_package: it is not installed"):
        require_module(name)
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "namespaces,no_such_package")
    with pytest.raises(pytest.fail.Exception, match="no_such_package is required here: it is not installed"):
        require_module(name)
    assert require_module(__name__).__name__ == __name__


def test_continuous_integration_requires_all_but_what_it_does_not_install() -> None:
    """A test that needs something else would go quiet there, and nobody would notice."""
    named = {
        name
        for path in (PROJECT_DIRECTORY / "tests").rglob("*.py")
        for name in re.findall(r'\brequire(?:_module)?\(\s*"(\w+)', path.read_text())
    }
    assert named >= {"mount", "mpirun", "namespaces", "ray", "kubernetes_validate", "tensorboard"}
    (required,) = re.findall(r"LOCKSTEP_REQUIRE=(\S+)", (PROJECT_DIRECTORY / ".ci" / "run").read_text())
    assert named - {*required.split(",")} == {"ray"}
