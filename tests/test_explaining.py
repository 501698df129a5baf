"""What is said of a job none of whose ranks has reported an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.capabilities import TORCH_SIGNS
from watch.explaining import EndedJob, explain
from watch.failures import FailureKind
from watch.rank_files import RankFiles


def _ended(starter_log: Path, **facts: Any) -> EndedJob:
    usual: dict[str, Any] = {
        **{"ranks": [], "num_processes": 2, "spans_nodes": False, "signs": TORCH_SIGNS, "launcher": "torchrun"},
        **{"killed_by": None, "return_code": 1, "outlived": set(), "ended_by_us": set(), "starter_log": starter_log},
    }
    return EndedJob(**(usual | facts))


@pytest.mark.parametrize(("spans_nodes", "rest"), [(False, ""), (True, " (the cause may lie on another node)")])
def test_the_starter_has_failed(tmp_path: Path, spans_nodes: bool, rest: str) -> None:
    starter_log = tmp_path / "starter.log"
    starter_log.write_text("Traceback ...\nRendezvousConnectionError: The connection to the C10d store has failed.\n")
    failure = explain(_ended(starter_log, spans_nodes=spans_nodes))
    assert failure.kind is FailureKind.LAUNCHER
    words = "the starter ended with code 1: RendezvousConnectionError: The connection to the C10d store has failed."
    assert str(failure) == words + rest
    assert failure.where_to_read_more == f"\n  more in {starter_log}"


def test_a_rank_that_its_library_ends_because_another_is_lost_is_not_the_cause(tmp_path: Path) -> None:
    """As Horovod's gloo does with an uncaught exception, while it connects to a rank that is killed."""
    ranks = [RankFiles(tmp_path, number) for number in range(2)]
    for rank in ranks:
        rank.log.parent.mkdir(parents=True, exist_ok=True)
        rank.announce()
    thrown = "terminate called after throwing an instance of 'gloo::IoException'\n  what():  Connection reset by peer\n"
    ranks[0].log.write_text(f"{thrown}Fatal Python error: Aborted\n")
    ranks[1].log.write_text("")
    failure = explain(_ended(tmp_path / "starter.log", ranks=ranks))
    assert (failure.kind, failure.rank) == (FailureKind.SILENT, 1)
    alone = _ended(tmp_path / "starter.log", ranks=ranks[:1], spans_nodes=True)
    assert str(explain(alone)).endswith("crashed (Aborted) (the cause may lie on another node)")


def test_an_old_crash_explains_no_new_death(tmp_path: Path) -> None:
    """A rank that was started again writes into the log of the one before."""
    rank = RankFiles(tmp_path, 0)
    rank.log.parent.mkdir(parents=True)
    rank.log.write_text("Connection reset by peer\nFatal Python error: Bus error\n")
    rank.announce()
    assert (rank.crash(), rank.last_words()) == (None, "")
    failure = explain(_ended(tmp_path / "starter.log", ranks=[rank], num_processes=1))
    assert "ended without a message" in str(failure)
    with rank.log.open("a", encoding="utf-8") as log:
        log.write("größer\nFatal Python error: Aborted\n")
    assert (rank.crash(), rank.last_words()) == ("Aborted", "größer")
    rank.announce()
    assert rank.crash() is None


def test_a_lost_connection_long_before_a_crash_explains_nothing(tmp_path: Path) -> None:
    ranks = [RankFiles(tmp_path, number) for number in range(2)]
    for rank in ranks:
        rank.log.parent.mkdir(parents=True, exist_ok=True)
        rank.announce()
        rank.log.write_text("")
    lines = ["a download is tried again: Connection reset by peer", *(f"line {number}" for number in range(20))]
    ranks[0].log.write_text("\n".join([*lines, "Fatal Python error: Aborted", ""]))
    assert str(explain(_ended(tmp_path / "starter.log", ranks=ranks))).endswith("crashed (Aborted)")
