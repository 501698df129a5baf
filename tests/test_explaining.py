"""What is said of a job none of whose ranks has reported an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.capabilities import TORCH_SIGNS
from watch.explaining import EndedJob, explain
from watch.failures import FailureKind


@pytest.mark.parametrize(("spans_nodes", "rest"), [(False, ""), (True, " (the cause may lie on another node)")])
def test_the_engine_has_failed(tmp_path: Path, spans_nodes: bool, rest: str) -> None:
    engine_log = tmp_path / "engine.log"
    engine_log.write_text("Traceback ...\nRendezvousConnectionError: The connection to the C10d store has failed.\n")
    failure = explain(
        EndedJob(
            ranks=[],
            num_processes=2,
            spans_nodes=spans_nodes,
            signs=TORCH_SIGNS,
            launcher="torchrun",
            killed_by=None,
            return_code=1,
            outlived=set(),
            ended_by_us=set(),
            engine_log=engine_log,
        )
    )
    assert failure.kind is FailureKind.LAUNCHER
    words = "the engine ended with code 1: RendezvousConnectionError: The connection to the C10d store has failed."
    assert str(failure) == words + rest
    assert failure.where_to_read_more == f"\n  more in {engine_log}"
