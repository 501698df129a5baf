"""What a race keeps from its entrants: free memory that is scattered."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from compare.race import heat, memory_limit, scattered_memory
from compare.race.directory import RaceDirectory
from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions
from compare.race.scattered_memory import allocated, scattered_bytes, scattered_memory_held

MEBIBYTE = 2**20
PART = 64 * MEBIBYTE


@pytest.fixture
def free_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "buddyinfo"
    monkeypatch.setattr(scattered_memory, "_FREE_BLOCKS", path)
    return path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with much memory, nothing of which is taken really; lists the sizes that are asked for."""
    sizes: list[int] = []

    def allocate(size: int) -> SimpleNamespace:
        sizes.append(size)
        return SimpleNamespace(close=sizes.pop)

    monkeypatch.setattr(scattered_memory, "allocated", allocate)
    monkeypatch.setattr(memory_limit, "GROUPS", ())
    _has(monkeypatch, available=2**34)
    return sizes


def _has(monkeypatch: pytest.MonkeyPatch, *, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=2**35))


def _sees(monkeypatch: pytest.MonkeyPatch, scattered: Iterator[int]) -> None:
    monkeypatch.setattr(scattered_memory, "scattered_bytes", lambda: next(scattered))


def test_blocks_shorter_than_a_huge_page_are_scattered(monkeypatch: pytest.MonkeyPatch, free_blocks: Path) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 4096)
    free_blocks.write_text(
        "Node 0, zone    DMA32      1      2      0      0      0      0      0      0      0      7    752 \n"
        "Node 0, zone   Normal     10      0      0      0      0      0      0      0      3      0      5 \n"
    )
    assert scattered_bytes() == (1 + 2 * 2 + 10) * 4096 + 3 * MEBIBYTE


@pytest.mark.parametrize(
    "content", [None, "", "Node 0, zone DMA\n", "Node 0, zone Normal 99999999\nNode 1, zone Normal 99999999\n"]
)
def test_nothing_is_held_where_it_is_not_known_what_would_be_taken(
    free_blocks: Path, taken: list[int], content: str | None
) -> None:
    if content is not None:
        free_blocks.write_text(content)
    with scattered_memory_held() as held:
        assert held == 0
        assert not taken


def test_it_is_held_for_as_long_as_entrants_live(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    _sees(monkeypatch, iter([3 * PART, 2 * PART, PART, PART // 2]))
    with scattered_memory_held() as held:
        assert held == sum(taken) == 3 * PART
    assert not taken


def test_two_parts_in_vain_are_the_last(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    seen = [9.0, 9.5, 8.5, 7.5, 7.25, 7.0]  # at first, another program ends
    _sees(monkeypatch, iter([int(parts * PART) for parts in seen]))
    with scattered_memory_held() as held:
        assert held == sum(taken) == 5 * PART


def test_entrants_keep_their_share_of_the_memory(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    _has(monkeypatch, available=25 * PART)
    _sees(monkeypatch, iter(range(90 * PART, 0, -PART)))
    with scattered_memory_held() as held:
        assert held == 2 * PART


def test_memory_that_the_system_refuses_ends_nothing(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    def refuse(size: int) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(scattered_memory, "allocated", refuse)
    _sees(monkeypatch, iter([9 * PART]))
    with scattered_memory_held() as held:
        assert held == 0


@pytest.mark.parametrize(("limit", "expected"), [("max\n", PART), (f"{2**36}\n", PART), (f"{2**30}\n", 0)])
def test_a_container_with_limited_memory_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: list[int], limit: str, expected: int
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    files = [(tmp_path / name, tmp_path / "usage", tmp_path / "stat", "") for name in ("absent", "memory.max")]
    monkeypatch.setattr(memory_limit, "GROUPS", [memory_limit.ControlGroup(*group) for group in files])
    _sees(monkeypatch, iter([PART, 0]))
    with scattered_memory_held() as held:
        assert held == expected


def test_pages_are_allocated_and_not_huge() -> None:
    resident, huge = psutil.Process().memory_info().rss, _huge_kilobytes()
    memory = allocated(PART)
    assert psutil.Process().memory_info().rss - resident > PART * 0.9
    assert _huge_kilobytes() - huge < PART / 1024 / 2  # other memory of this process may change meanwhile
    memory.close()


def _huge_kilobytes() -> int:
    (number,) = re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(number)


@pytest.mark.parametrize("placement", [True, False])
def test_it_is_taken_before_entrants_start_and_given_back_after_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: list[int], placement: bool
) -> None:
    seen: list[bool] = []

    def start(*_: object) -> None:
        seen.append(bool(taken))
        raise OSError("refused")

    monkeypatch.setattr(heat, "_started", start)
    _sees(monkeypatch, iter([PART, 0]))
    options = RaceOptions(backends=["ddp"], num_processes=[2], placement=placement, wait_for_idle=False)
    plan, _ = make_plan(options, read_run_options(["--task=token-tagging", "--device=cpu"], None))
    with pytest.raises(OSError, match="refused"):
        heat.run_heat(plan, [], RaceDirectory(tmp_path), {}, None)
    assert seen == [placement]
    assert not taken
