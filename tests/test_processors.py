"""The contract on other processors, as far as one can pose as another: fewer or more threads, other kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import OF_EACH_STARTER, require_backend
from tests.processors import ADAPTERS
from tests.sparing import in_ci

pytestmark = pytest.mark.slow

# All changes at once, then some, and each of them alone.
TOGETHER = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "3",
}
PROCESSORS = (
    TOGETHER,
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "3"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
)


@pytest.mark.parametrize(
    "variables", in_ci([TOGETHER], PROCESSORS), ids=lambda variables: " ".join(f"{n}={v}" for n, v in variables.items())
)
def test_every_backend_keeps_its_bits(variables: dict[str, str]) -> None:
    """What is claimed to the last bit, and half precision, hold for each backend, and all end with the same bits."""
    for backend in OF_EACH_STARTER:
        require_backend(backend)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY), **variables}
    command = [sys.executable, "-m", "tests.processors", "--bert"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [*ADAPTERS, *OF_EACH_STARTER]
    kernels = {name: value for name, value in variables.items() if not name.startswith("OMP_")}
    for line in lines[len(ADAPTERS) :]:  # what the ranks of BERT found in their environment
        assert all(f"'{name}': '{value}'" in line for name, value in kernels.items()), line
