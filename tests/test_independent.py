"""Ranks that do not communicate: what they say of the limit of a machine rests on that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.registry import INDEPENDENT
from tests.launching import train

JOB = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "10", "--diagnose")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "communicates"), [(INDEPENDENT, False), ("ddp", True)])
def test_they_reduce_nothing_while_they_train(tmp_path: Path, backend: str, communicates: bool) -> None:
    record = train(backend, tmp_path / "run", *JOB)
    for rank in record["ranks"]:
        reduced = rank["diagnosis"]["num_reductions"]
        assert len(reduced) > 0
        assert [number > 0 for number in reduced] == [communicates] * len(reduced), json.dumps(rank["diagnosis"])[:500]
