"""Network namespaces as hosts: what a machine must have for them, and what tc is given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engines.command import planned
from launch.errors import UsageError
from tests.launching import LOCKSTEP, lockstep, needs_namespaces

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_NODES = ("--engine", "netns", "--num-nodes", "2")


@needs_namespaces
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv takes the right away")
def test_it_is_refused_without_the_right_to_make_namespaces(tmp_path: Path) -> None:
    without = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    command = [*without, str(LOCKSTEP), "ddp", *TWO_NODES, *OPTIONS, "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "--engine netns: network namespaces cannot be made here" in done.stderr
    assert "run as root on Linux, in a container with the capability SYS_ADMIN" in done.stderr
    assert not (tmp_path / "run").exists()


@needs_namespaces
@pytest.mark.parametrize(("option", "value"), [("--latency", "1ms"), ("--loss", "0.1%")])
def test_what_needs_netem_is_refused_where_the_kernel_has_none(tmp_path: Path, option: str, value: str) -> None:
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    has_netem = subprocess.run(probe, capture_output=True).returncode == 0
    done = lockstep("ddp", *TWO_NODES, option, value, *OPTIONS, "--max-steps", "1", "--output-dir", tmp_path / "run")
    assert done.returncode == (0 if has_netem else 2)
    if not has_netem:
        assert f"{option}: the kernel has no netem" in done.stderr


def test_a_latency_below_a_microsecond_is_no_latency_of_nothing() -> None:
    engine, _ = planned(["ddp", "--engine", "netns", "--num-nodes", "2", "--latency", "400ns", "--bandwidth", "1gbit"])
    netem, tbf = engine._limit().split(";")
    assert netem == "root handle 1: netem delay 0.400us limit 100000"  # tc knows no nanoseconds
    assert tbf.startswith("parent 1: handle 2: tbf rate 1000000000bit ")


def test_what_tc_is_given_for_packets_that_are_late_and_lost() -> None:
    engine, _ = planned(["ddp", *TWO_NODES, "--latency", "5ms", "--loss", "0.1%"])
    assert engine._limit() == "root handle 1: netem delay 5000.000us loss 0.100000% limit 100000"
    engine, _ = planned(["ddp", *TWO_NODES, "--loss", "0.1%"])
    assert engine._limit() == "root handle 1: netem loss 0.100000% limit 100000"


@pytest.mark.parametrize(("program", "package"), [("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")])
def test_a_program_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, package: str
) -> None:
    for other in {"unshare", "ip", "tc"} - {program}:
        (tmp_path / other).touch(mode=0o755)
    monkeypatch.setattr("engines.netns._path", lambda: str(tmp_path))
    engine, _ = planned(["ddp", *TWO_NODES, "--output-dir", str(tmp_path / "run")])
    with pytest.raises(UsageError, match=f"^--engine netns: {program} is not installed; install {package}$"):
        engine.check_here()
    assert not (tmp_path / "run").exists()
