"""``launch/run.sh contract``: its output, its exit codes, and the requests that it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.registry import find_backend
from contract.check import all_checks
from contract.patience import stretched
from launch.cli import main
from tests.launching import LOCKSTEP, ending, lockstep, wait_until

BY_HAND = "tests.by_hand:ByHandBackend"


def test_command_prints_a_row_a_check_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ("--num-processes", "2", "--precision", "fp32", "--check", "C16,C01,C04", "--json", target)
    done = lockstep("contract", BY_HAND, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("C")}
    assert sorted(rows) == ["C01", "C04", "C16"]
    assert all(" passed " in row for row in rows.values())
    # Whoever waits for a file to grow sees which group has begun, before any of its rows.
    assert lines.index("2 ranks, fp32: 0 of 12 results so far") < lines.index(rows["C16"])
    assert done.stdout.splitlines()[-1].startswith(f"{BY_HAND} on cpu: 3 passed in")
    report = json.loads(target.read_text())
    assert report["adapter"] == BY_HAND
    assert [check["state"] for check in report["checks"]] == ["passed"] * 3
    seen = {result["case"] for result in report["checks"][2]["results"]}
    assert seen == {
        *("accumulation-1", "accumulation-2", "accumulation-4", "wide", "layers"),
        *("packed-batches", "sorted-batches", "varied", "many-tensors", "unclipped"),
    }


@pytest.mark.slow
def test_command_works_from_anywhere_with_a_relative_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter.py").write_text(Path(__file__).with_name("by_hand.py").read_text())
    options = ("--num-processes", "2", "--check", "C16")
    done = lockstep("contract", "adapter:ByHandBackend", *options, cwd=tmp_path, env={"PYTHONPATH": "mine"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--planted-error", "0"), 0)], ids=["default", "sound"])
def test_an_adapter_is_held_to_the_contract_with_options_of_its_own(
    tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    adapter, target = "tests.variants_of_ddp:StrayingDDP", tmp_path / "out.json"
    which = ("--num-processes", "2", "--precision", "fp32", "--check", "C16")
    done = lockstep("contract", adapter, *options, *which, "--json", target)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(" ".join([adapter, *options, "on cpu: 1"]))
    assert json.loads(target.read_text())["settings"] == ({"planted_error": 0.0} if options else {})


def test_a_failure_says_what_was_expected_seen_and_where(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = lockstep(
        "contract", "tests.mutants.adapters:LonelyBackend", "--num-processes", "2", "--check", "C16", "--json", target
    )
    assert done.returncode == 1
    assert "breaks the contract" in done.stderr
    (check,) = json.loads(target.read_text())["checks"]
    assert check["state"] == "failed"
    assert "(C01)" in check["reason"]
    assert "rank 0: expected a world size of 2, saw 1" in check["reason"]
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("C16"))
    assert check["reason"] in row  # the whole of it in one line, however long


@pytest.mark.slow
def test_a_hang_is_ended_and_named_within_half_a_minute(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    began, patience = time.monotonic(), stretched(1)
    options = ("--num-processes", "2", "--precision", "fp32", "--check", "C23,C24", "--json", target)
    done = lockstep("contract", "tests.mutants.adapters:HangingBackend", *options)
    assert time.monotonic() - began < max(patience, stretched(1)) * (2 * 30 + 30)
    assert done.returncode == 1
    first, second = json.loads(target.read_text())["checks"]
    # C23 has two cases, which both hang; then nothing else is tried.
    assert (first["state"], second["state"]) == ("failed", "not run")
    for check in (first, second):
        assert "rank 1" in check["reason"]
        assert "stuck" in check["reason"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_time_limit_from_outside_learns_what_was_running(tmp_path: Path) -> None:
    """SIGTERM is what ends a command that hangs; Ctrl-C is a user who wants to leave nothing behind."""
    command = [str(LOCKSTEP), "contract", "tests.mutants.adapters:HangingBackend", "--check", "C23"]
    command += ["--num-processes", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with ending(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)) as job:
        wait_until(lambda: next(tmp_path.glob("lockstep-contract-*/*/*/logs/rank1.log"), None), "a rank", job=job)
        job.send_signal(signal.SIGTERM)
        _, stderr = job.communicate(timeout=180)
    assert job.returncode == 128 + signal.SIGTERM
    was, ended = stderr.splitlines()[-2:]
    assert was.startswith("lockstep: what was running: 2 ranks, fp32: ")
    (kept,) = tmp_path.glob("lockstep-contract-*")
    assert ended == f"lockstep: interrupted by SIGTERM; all ranks have been ended; the logs of its ranks are in {kept}"
    assert list(kept.glob("*/*/logs/rank1.log"))


def test_what_never_ran_is_not_run_and_its_cause_is_said_once() -> None:
    done = lockstep(
        "contract", "tests.mutants.adapters:UnstartableBackend", "--num-processes", "2", "--check", "C01,C02,C16,C17"
    )
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("C")]
    assert len(rows) == 2, done.stdout
    assert rows[0].split()[0] == "C01"
    assert " failed " in rows[0]
    assert "there is no network here" in rows[0]
    assert rows[1] == "C02, C16, C17:  not run, for the reason given at C01"
    assert "1 failed, 3 not run in" in done.stdout.splitlines()[-1]


def test_explain() -> None:
    done = lockstep("contract", "--explain", "C07")
    assert done.returncode == 0
    assert done.stdout.startswith(f"C07  {all_checks()['C07'].clause[:40]}")
    assert "G7 " in done.stdout
    assert "\n  Backend.setup: No weight or buffer of rank 0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name an adapter"),
        (("nothing",), "there is no backend 'nothing'"),
        (("no.such:Thing",), "cannot be imported"),
        (("tests.by_hand:os",), "not a subclass"),
        (("ddp", "--check", "C99"), "--check C99"),
        (("ddp", "--check", ""), "--check"),
        (("ddp", "--precision", "fp8"), "--precision fp8"),
        (("ddp", "--num-processes", "0"), "--num-processes 0"),
        (("ddp", "--num-processes", "two"), "--num-processes two"),
        (("ddp", "--num-processes", "1,"), "--num-processes 1,"),
        (("ddp", "--num-processes", "100000"), "--num-processes 100000"),
        (("ddp", "--device", "tpu"), "--device tpu"),
        (("ddp", "--device", "cuda"), "--device cuda"),
        (("ddp", "--json", "/nowhere/at/all.json"), "/nowhere/at"),
        (("ddp", "--json", __file__), "exists already"),
        (("ddp", "--json", "/proc/out.json"), "--json /proc/out.json"),
        (("ddp", "--check", "C24", "--num-processes", "1"), "no clause matches"),
        (("ddp", "--wrong"), "--wrong"),
        (("ddp", "--zero-stage", "2"), "--zero-stage"),
        (("deepspeed", "--zero-stage", "9"), "--zero-stage 9"),
        (("deepspeed", "--zero-stage", "3"), "--zero-stage 3: under deepspeed, each rank holds all weights"),
        (("ddp", "--transport", "pigeon"), "--transport pigeon"),
        (("--explain", "C01", "--zero-stage", "2"), "--zero-stage"),
        (("ddp", "horovod"), "horovod"),
        (("--explain",), "--explain"),
        (("--explain", "C99"), "--explain C99"),
        (("ddp", "--explain", "C01"), "--explain takes no adapter"),
    ],
    ids=str,
)
def test_bad_requests_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "contract", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1, printed.err
    assert words in printed.err
    assert not printed.out


def test_an_adapter_that_supports_nothing_of_what_was_asked_for_proves_nothing() -> None:
    done = lockstep("contract", BY_HAND, "--num-processes", "2", "--check", "C37")  # it declares no unused parameters
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{BY_HAND} on cpu: 1 unsupported in")
    assert f"nothing was proven: {BY_HAND} cannot run here: it supports none of what was asked for" in done.stderr


def test_an_adapter_that_cannot_run_here_proves_nothing() -> None:
    if find_backend("apex").unavailable_reason() is None:
        pytest.skip("apex runs here")
    done = lockstep("contract", "apex")
    assert done.returncode == 2
    assert "nothing was proven" in done.stderr
    assert "unavailable" in done.stdout
    assert "passed" not in done.stdout
