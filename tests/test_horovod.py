"""What is Horovod's alone: its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import lockstep, require_backend


@pytest.mark.parametrize(("variable", "value"), [("HOROVOD_FUSION_THRESHOLD", "64MB"), ("HOROVOD_CYCLE_TIME", "fast")])
def test_a_variable_that_is_no_number_is_refused_before_any_step(tmp_path: Path, variable: str, value: str) -> None:
    require_backend("horovod")
    options = ("--task", "token-tagging", "--max-steps", "2", "--output-dir", tmp_path / "run")
    done = lockstep("horovod", *options, env={variable: value})
    assert done.returncode == 1
    assert f"{variable}={value}: is not a" in done.stderr
    assert "step 1" not in done.stdout
