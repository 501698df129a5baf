"""How much memory the entrants of a race may take together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from compare.race import memory_limit
from compare.race.memory_limit import ControlGroup, available_bytes, is_limited

GIBIBYTE = 2**30


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files of a control group, none of which is there yet, on a machine with 32 GiB, 20 of them free."""
    files = ControlGroup(tmp_path / "max", tmp_path / "current", tmp_path / "stat", "inactive_file")
    monkeypatch.setattr(memory_limit, "GROUPS", [files])
    has = SimpleNamespace(available=20 * GIBIBYTE, total=32 * GIBIBYTE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: has)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 20),
        ({"max": "max\n", "current": f"{5 * GIBIBYTE}\n"}, 20),
        ({"max": f"{8 * GIBIBYTE}\n"}, 8),
        ({"max": f"{8 * GIBIBYTE}\n", "current": f"{5 * GIBIBYTE}\n"}, 3),
        ({"max": f"{8 * GIBIBYTE}\n", "current": f"{9 * GIBIBYTE}\n"}, 0),
        ({"max": f"{30 * GIBIBYTE}\n", "current": f"{5 * GIBIBYTE}\n"}, 20),
        # What the kernel keeps of files, it gives back.
        (
            {
                "max": f"{8 * GIBIBYTE}\n",
                "current": f"{5 * GIBIBYTE}\n",
                "stat": f"anon 1\ninactive_file {4 * GIBIBYTE}\n",
            },
            7,
        ),
    ],
)
def test_a_container_may_have_less_than_the_machine(group: Path, files: dict[str, str], expected: int) -> None:
    for name, content in files.items():
        (group / name).write_text(content)
    assert available_bytes() == expected * GIBIBYTE
    assert is_limited() == (files.get("max", "max\n") != "max\n")


def test_the_limits_of_this_machine_can_be_read() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
