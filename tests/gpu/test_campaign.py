"""The campaign itself, tried on a CPU: what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from backends.devices import count_gpus
from launch.starters.interface import PROJECT_DIRECTORY
from tests.forked.client import interpreter
from tests.gpu.campaign import Campaign, Entry, entries

pytestmark = pytest.mark.slow

_TINY = (
    *("--device", "cpu", "--backends", "ddp", "--check", "C16", "--precision", "fp32"),
    *("--model", "bert-tiny", "--batch-size", "4", "--max-steps", "8", "--rounds", "1"),
)


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # What it starts, torchrun included, is forked from a process that has loaded all libraries.
    command = [interpreter(), "-m", "tests.gpu.campaign", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_DIRECTORY)


@pytest.mark.slow
def test_a_campaign_leaves_numbers_and_a_table(tmp_path: Path) -> None:
    done = _run(*_TINY, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (target,) = tmp_path.glob("*.json")
    results = json.loads(target.read_text())
    assert [contract["checks"] for contract in results["contracts"]] == [{"C16": "passed"}]
    assert {run["entry"] for run in results["runs"]} >= {"ddp fp32"}
    for run in results["runs"]:
        # No text is padded: what is computed is what counts.
        (rank,) = run["record"]["ranks"]
        assert rank["tokens"] == rank["positions"] == [4 * 128] * 8
    page = target.with_suffix(".md").read_text()
    assert "| ddp | 1 | 0 |" in page
    assert "| ddp fp32 | 1 |" in page
    again = _run(*_TINY, "--output-dir", tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert json.loads(target.read_text()) == results


@pytest.mark.skipif(count_gpus() > 0, reason="here is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = _run("--output-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "campaign: no GPU is visible here; run it on a machine with one\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-steps", "5"), "--max-steps 5"),
        (("--backends", "dpd"), "--backends dpd"),
        (("--precision", "fp8"), "--precision fp8"),
        (("--check", "C99"), "--check C99"),
        (("--device", "cpu", "--output-dir", "/proc/nowhere"), "--output-dir /proc/nowhere"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, ...], words: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]


def test_an_adapter_without_the_clauses_that_are_asked_for_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.campaign.more_options", lambda adapter: ["--precision", "fp16"])
    options = Namespace(device="cpu", check="C36", time_limit=120)
    found = Campaign(options, tmp_path, tmp_path / "target.json", {}).hold_to_contract("single")
    assert "no clause matches" in found["unavailable"]


def test_apex_races_at_both_levels_and_uncompiled() -> None:
    found = entries(["single", "apex"], "cuda")
    assert {entry for entry in found if entry.backend == "apex"} == {
        Entry("apex", "fp32", torch_compile=False),
        Entry("apex", "fp16", torch_compile=False, opt_level="O1"),
        Entry("apex", "fp16", torch_compile=False, opt_level="O2"),
    }
    assert len([entry for entry in found if entry.backend == "single"]) == 6
