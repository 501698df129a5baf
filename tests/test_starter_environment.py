"""Which variables of the user's environment ranks get as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.starters.environment import is_settled, starter_environment
from launch.starters.interface import Ranks
from launch.starters.registry import STARTERS

# Some that describe ranks, that libraries read, and that ranks get.
OTHERS = ("RANK", "ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "DS_ACCELERATOR", "PYTHONSTARTUP", "LD_PRELOAD")
OTHERS += ("CUDA_VISIBLE_DEVICES", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", STARTERS)
def test_what_is_settled_is_what_ranks_do_not_get(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(2, ("module",), device, 3, None, 15.0, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {})
        variables = {*starter_environment(STARTERS[name], ranks), *OTHERS} - {"PYTHONPATH"}  # which is added to
        patched.setattr(os, "environ", dict.fromkeys(variables, "mine"))
        environment = starter_environment(STARTERS[name], ranks)
    changed = {variable for variable in variables if environment.get(variable) != "mine"}
    assert changed == {variable for variable in variables if is_settled(variable, device)}
    assert {"OMP_NUM_THREADS", "RANK"} < changed
    assert ("CUDA_VISIBLE_DEVICES" in changed) == (device == "cpu")
    assert not changed & {"NCCL_DEBUG", "HOROVOD_CYCLE_TIME", "LD_PRELOAD"}
