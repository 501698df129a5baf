"""What a race keeps from its entrants: free memory that is scattered."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from compare.race import scattered_memory
from compare.race.scattered_memory import ScatteredMemory, scattered_bytes

MEBIBYTE = 2**20
PART = 64 * MEBIBYTE


@pytest.fixture
def free_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "buddyinfo"
    monkeypatch.setattr(scattered_memory, "_FREE_BLOCKS", path)
    return path


def _has(monkeypatch: pytest.MonkeyPatch, *, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def _sees(monkeypatch: pytest.MonkeyPatch, scattered: Iterator[int]) -> None:
    monkeypatch.setattr(scattered_memory, "scattered_bytes", lambda: next(scattered))


def _held(memory: ScatteredMemory) -> int:
    return sum(map(len, memory._held))


def test_blocks_shorter_than_a_huge_page_are_scattered(monkeypatch: pytest.MonkeyPatch, free_blocks: Path) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 4096)
    free_blocks.write_text(
        "Node 0, zone    DMA32      1      2      0      0      0      0      0      0      0      7    752 \n"
        "Node 0, zone   Normal     10      0      0      0      0      0      0      0      3      0      5 \n"
    )
    assert scattered_bytes() == (1 + 2 * 2 + 10) * 4096 + 3 * MEBIBYTE


@pytest.mark.parametrize("content", [None, "", "Node 0, zone DMA\n"])
def test_nothing_is_held_where_the_system_does_not_tell(free_blocks: Path, content: str | None) -> None:
    if content is not None:
        free_blocks.write_text(content)
    with ScatteredMemory() as memory:
        memory.take()
        assert _held(memory) == 0


def test_it_is_held_for_as_long_as_entrants_live(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, available=2**34)
    _sees(monkeypatch, iter([3 * PART, 2 * PART, PART, PART // 2]))
    with ScatteredMemory() as memory:
        memory.take()
        assert _held(memory) == 3 * PART
        assert all(part[:: mmap.PAGESIZE] == bytes(PART // mmap.PAGESIZE) for part in memory._held)
    assert _held(memory) == 0


def test_what_does_not_become_less_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, available=2**34)
    _sees(monkeypatch, iter([9 * PART, 8 * PART, 8 * PART - PART // 4]))
    with ScatteredMemory() as memory:
        memory.take()
        assert _held(memory) == 2 * PART


def test_entrants_keep_their_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, available=10 * PART)
    _sees(monkeypatch, iter(range(90 * PART, 0, -PART)))
    with ScatteredMemory() as memory:
        memory.take()
        assert _held(memory) == 2 * PART


@pytest.mark.skipif(not Path("/proc/buddyinfo").exists(), reason="this system does not tell")
def test_it_takes_what_this_machine_has() -> None:
    before = scattered_bytes()
    with ScatteredMemory() as memory:
        memory.take()
        assert _held(memory) > 0 or before < 2 * PART
