"""The page of traps agrees with the checks and tests that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from contract.check import all_checks
from contract.traps import Trap, load_traps, render
from launch.starters.interface import PROJECT_DIRECTORY

# The number of entries in the catalogue under each letter.
FAMILIES = {"O": 6, "S": 16, "G": 23, "A": 14, "C": 8, "F": 16, "R": 7, "K": 14, "H": 14, "P": 11, "L": 12, "B": 7}
IDS = [f"{letter}{number}" for letter, count in FAMILIES.items() for number in range(1, count + 1)]
TRAPS = load_traps()


def _claimed() -> set[str]:
    return {trap_id for check in all_checks().values() for trap_id in check.traps}


def test_every_trap_has_its_row() -> None:
    assert list(TRAPS) == IDS
    assert len(IDS) == 148


def test_checks_claim_known_traps_only() -> None:
    assert _claimed() <= set(IDS)


@pytest.mark.parametrize("trap_id", IDS)
def test_the_verdict_holds(trap_id: str) -> None:
    trap = TRAPS[trap_id]
    if trap.verdict == "caught":
        assert trap_id in _claimed() or trap.tests, "caught by nothing"
    else:
        assert trap.how, "no reason"
        assert trap_id not in _claimed(), "a check claims to catch it"
        assert not trap.tests


@pytest.mark.parametrize("trap", [trap for trap in TRAPS.values() if trap.tests], ids=lambda trap: trap.tests[0])
def test_the_tests_it_names_exist(trap: Trap) -> None:
    for test in trap.tests:
        path, _, name = test.partition("::")
        tree = ast.parse((PROJECT_DIRECTORY / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


def test_the_page_is_up_to_date() -> None:
    assert Path(PROJECT_DIRECTORY / "docs" / "traps.md").read_text() == render()
