"""The engine mpi: mpirun starts the nodes, here on network namespaces that it reaches by a stand-in for ssh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from compare.collectives.measurement import read_collectives
from compare.results import Results
from launch.starters.interface import PROJECT_DIRECTORY
from tests.forked.client import forked_lockstep
from tests.launching import (
    LOCKSTEP,
    ending,
    lockstep,
    processes_of,
    processes_with,
    require,
    require_backend,
    train,
    wait_until,
)
from tests.sparing import in_ci
from watch.rank_files import RankFiles, started_ranks

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_HOSTS = ("--engine", "mpi", "--hosts", "n2:1,n1:1")
RACE = (
    *("--engine", "mpi", "--hosts", "n0,n1", "--task", "token-tagging", "--no-wait-for-idle", "--no-collectives"),
    *("--no-limits",),
)

# A host gets no variable and no file descriptor from ssh: what its processes know comes from mpirun.
_SSH = 'host=$1; shift; exec ip netns exec "$host" unshare --uts env -i PATH="$PATH" sh -c "hostname $host; $*"'
# The network lasts as long as the other hosts, so that what has been killed on the first can be noticed there.
_OF_NODE_0 = '[ "$NODE_RANK" = 0 ] || exec sleep 300; exec "$@"'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    lacks = os.geteuid() != 0 or shutil.which("mpirun") is None or shutil.which("ip") is None
    require("mpirun", "hosts that mpirun reaches need root, iproute2 and Open MPI" if lacks else None)
    (tmp_path / "rsh").write_text(f"#!/bin/sh\n{_SSH}\n")
    (tmp_path / "rsh").chmod(0o755)
    (tmp_path / "node").write_text(_OF_NODE_0)
    return tmp_path


def _start(place: Path, *arguments: str | Path, lockstep: Sequence[str] = (str(LOCKSTEP),)) -> subprocess.Popen[str]:
    """Starts the command line on the first of three hosts; what it prints is in node0.log, beside its exit code."""
    line = subprocess.list2cmdline(["sh", str(place / "node"), *lockstep, *map(str, arguments)])
    lab = ["unshare", "--net", "--mount", "bash", str(PROJECT_DIRECTORY / "engines" / "netns.sh")]
    environment = {**os.environ, "OMPI_MCA_plm_rsh_agent": str(place / "rsh")}
    return subprocess.Popen([*lab, "3", "", str(place), line], env=environment, text=True)


def _run(place: Path, *arguments: str | Path) -> tuple[int, str]:
    """Runs it to its end; all that it starts is forked, on each host."""
    return _ended(place, _start(place, *arguments, lockstep=forked_lockstep()))


def _ended(place: Path, lab: subprocess.Popen[str]) -> tuple[int, str]:
    with ending(lab):
        exit_code = place / "node0.exit"
        wait_until(lambda: exit_code.exists() and exit_code.read_text(), "the end of the job", job=lab, seconds=300)
        _nothing_left(place)
        lab.terminate()
        lab.wait(timeout=60)
    return int(exit_code.read_text()), (place / "node0.log").read_text()


def _command(place: Path, name: str = "run") -> psutil.Process:
    """The process of the command line."""
    (found,) = [one for one in processes_of(place / name) if str(LOCKSTEP) in one.cmdline()]
    return found


def _nothing_left(place: Path) -> None:
    def left() -> list[str]:
        of_job = [one for path in (place / "run", *place.glob("run/node?")) for one in processes_of(path)]
        return [*map(str, of_job), *processes_with(place / "race" / "running").values()]

    wait_until(lambda: not left(), "the end of all processes")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "per_host"), [("ddp", 2), ("horovod", 1)])  # accelerate: torchrun's agent, too
def test_two_hosts_compute_what_one_does(place: Path, backend: str, per_host: int) -> None:
    require_backend(backend)
    alone = train(backend, place / "alone", *OPTIONS, "--num-processes", str(2 * per_host))
    two_hosts = ("--engine", "mpi", "--hosts", f"n2:{per_host},n1:{per_host}")
    code, output = _run(place, backend, *two_hosts, *OPTIONS, "--output-dir", place / "run")
    assert code == 0, output
    (path,) = (place / "run").glob("node*/record.json")
    together = json.loads(path.read_text())
    assert [rank["weights_sha256"] for rank in together["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert [step["loss"] for step in together["steps"]] == [step["loss"] for step in alone["steps"]]
    # The host that is named first is node 0.
    hosts = {0: "n2", 1: "n1"}
    node = int(path.parent.name.removeprefix("node"))
    expected = [hosts[node]] * per_host + [hosts[1 - node]] * per_host
    assert [rank["hostname"] for rank in together["ranks"]] == expected
    assert f"the model and the record are in {path.parent}" in output


@pytest.mark.slow
def test_collectives_are_measured_between_hosts(place: Path) -> None:
    output = place / "out.json"
    options = ("--backends", "ddp", "--operations", "all_reduce", "--sizes", "1KB,16KB", "--seconds-per-point", "0.01")
    code, said = _run(place, "allreduce", *TWO_HOSTS, *options, "--output", output)
    assert code == 0, said
    content = read_collectives(output)
    assert content.network == "mpi"
    assert [(one.num_processes, len(one.points)) for one in content.series] == [(2, 2)]


@pytest.mark.slow
def test_a_race_between_hosts(place: Path) -> None:
    """What two hosts compute is compared with what one process on the first of them computes."""
    options = ("--backends", "ddp", "--entrant", "own=horovod:HOROVOD_CYCLE_TIME=2", "--num-processes", "2")
    sizes = ("--repeats", "3", "--timed-steps", "20", "--diagnosis-steps", "10")
    code, output = _run(place, "compare", *RACE, *options, *sizes, "--output-dir", place / "race")
    assert code == 0, output
    results = Results.model_validate_json((place / "race" / "results.json").read_text())
    assert {result.group.machine for result in results.groups} == {None}  # of one machine
    (group,) = results.groups
    assert "(2 nodes)" in group.group.key
    assert {one.name: one.num_runs for one in group.entrants} == {"ddp": 3, "horovod (own)": 3}
    assert all(one.parity.verdict in ("bitwise", "rounding") for one in group.entrants)
    (facts,) = (place / "race" / "records").glob("timed-001-*-ddp-2x-*.race.json")
    assert len(json.loads(facts.read_text())["turns"]) > 2
    record = json.loads(facts.with_name(facts.name.replace(".race.json", ".json")).read_text())
    assert {rank["hostname"] for rank in record["ranks"]} == {"n0", "n1"}
    assert not list((place / "race").glob("running/*"))


def _rests(place: Path, host: str) -> bool:
    """Whether the ranks of all entrants on a host are stopped, of which there are two."""
    ranks = [
        psutil.Process(int(pid.read_text().split()[0])) for pid in place.glob(f"race/running/*/{host}/logs/rank*.pid")
    ]
    return len(ranks) == 2 and all(rank.status() == psutil.STATUS_STOPPED for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("who", in_ci(["race"], ["race", "keeper"]))
def test_nothing_is_left_stopped(place: Path, who: str) -> None:
    """Both entrants rest at times on a host that the race reaches through their keepers alone."""
    sizes = ("--repeats", "3", "--timed-steps", "60", "--no-diagnosis", "--num-processes", "2")
    words = ("compare", *RACE, "--backends", "ddp,horovod", *sizes, "--output-dir", place / "race")
    job = _start(place, *words)
    with ending(job):
        wait_until(lambda: _rests(place, "node1"), "a moment between two turns", job=job, seconds=300)
        if who == "race":
            _command(place, "race").kill()
        else:
            for pid, line in processes_with("node1").items():
                if line.split()[1:3] == ["-m", "compare.race.keeper"] and str(place) in line:
                    os.kill(pid, signal.SIGKILL)
        code, output = _ended(place, job)
    assert code == (137 if who == "race" else 0), output
    if who == "keeper":  # both starts have failed, and the race has gone on with the next ones
        why = "node 1: its command was killed, or its machine is gone"
        assert all(f"FAILED: {backend} failed: {why}" in output for backend in ("ddp", "horovod")), output
        assert "each entrant was started 2 times" in output


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_hosts(place: Path) -> None:
    job = _start(place, "ddp", *TWO_HOSTS, *OPTIONS, "--max-steps", "5000", "--output-dir", place / "run")
    with ending(job):
        node = place / "run" / "node1"
        rank = wait_until(lambda: next(filter(RankFiles.position, started_ranks(node)), None), "a rank", job=job)
        os.kill(rank.running_pid(), signal.SIGKILL)
        code, output = _ended(place, job)
    assert code == 1
    assert f"lockstep: node 1: ddp failed: rank {rank.rank} (n1, " in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(place: Path, number: signal.Signals) -> None:
    job = _start(place, "ddp", *TWO_HOSTS, *OPTIONS, "--max-steps", "5000", "--output-dir", place / "run")
    with ending(job):
        news = (place / "run" / "node0" / "progress.jsonl", place / "run" / "node1" / "progress.jsonl")
        wait_until(lambda: any(path.exists() for path in news), "a step", job=job)
        _command(place).send_signal(number)
        code, output = _ended(place, job)
    assert code == (75 if number == signal.SIGTERM else 137), output


@pytest.mark.slow
def test_a_node_that_refuses_is_not_waited_for(place: Path) -> None:
    (place / "run" / "node1").mkdir(parents=True)
    (place / "run" / "node1" / "thesis.txt").touch()
    code, output = _run(place, "ddp", *TWO_HOSTS, *OPTIONS, "--output-dir", place / "run")
    assert code == 2
    assert f"lockstep: node 1: --output-dir {place / 'run' / 'node1'}: is not empty" in output


@pytest.mark.slow
def test_a_host_that_cannot_be_reached(place: Path) -> None:
    hosts = ("--engine", "mpi", "--hosts", "n1:1,n3:1")
    code, output = _run(place, "ddp", *hosts, *OPTIONS, "--output-dir", place / "run")
    assert code == 2
    (line,) = output.splitlines()
    assert line.startswith("lockstep: --engine mpi: mpirun could not start the nodes: ")
    assert '"n3"' in line


REFUSALS = {
    "none": ("", "--hosts is missing", "a:4,b:4"),
    "empty": ("--hosts ,", "--hosts ,", "write it as a:4"),
    "not-a-number": ("--hosts a:4,b:x", "'b:x'", "write it as a:4"),
    "an-option": ("--hosts=-x", "'-x'", "write it as a:4"),
    "twice": ("--hosts a:4,b:4,a:4", "a is named twice", "once"),
    "uneven": ("--hosts a:4,b:2", "(a 4, b 2)", "the same"),
    "half-told": ("--hosts a,b:2", "(a none, b 2)", "the same"),
    "nodes": ("--hosts a:4,b:4 --num-nodes 3", "--num-nodes 3", "leave --num-nodes out"),
    "ranks": ("--hosts a:4,b:4 --num-processes 4", "--num-processes 4", "leave --num-processes out"),
    "no-file": ("--hostfile /nowhere", "--hostfile /nowhere", "cannot be read"),
    "empty-file": ("--hostfile /dev/null", "--hostfile /dev/null", "names no host"),
    "unknown": ("--hosts nowhere.invalid:1,b:1", "nowhere.invalid cannot be found", "give its address"),
    "one-process": ("--hosts a:1,b:1 --start-method fork", "fork", "torchrun"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    done = lockstep("ddp", "--engine", "mpi", *arguments.split(), "--output-dir", tmp_path / "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_is_refused_without_mpirun(tmp_path: Path) -> None:
    options = ("--engine", "mpi", "--hosts", "127.0.0.1:1", "--output-dir", tmp_path / "run")
    done = lockstep("ddp", *options, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr == ("lockstep: --engine mpi: mpirun is not installed; install Open MPI (Debian: openmpi-bin)\n")


def test_a_host_file_says_what_the_option_does(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\n10.0.0.9 slots=2\n10.0.0.1:2  # the new one\n")
    options = ("--dry-run", "--output-dir", tmp_path / "run")
    by_file = lockstep("ddp", "--engine", "mpi", "--hostfile", file, *options)
    by_name = lockstep("ddp", "--engine", "mpi", "--hosts", "10.0.0.9:2,10.0.0.1:2", *options)
    assert by_file.returncode == 0, by_file.stderr
    assert by_file.stdout == by_name.stdout
    first, last = by_file.stdout.splitlines()
    assert "--host 10.0.0.9 " in first
    assert "--host 10.0.0.1 " in last
    for rank, line in enumerate((first, last)):
        assert "--num-processes=4 --num-nodes=2" in line
        assert f"--node-rank={rank} --master-addr=10.0.0.9" in line
    assert not (tmp_path / "run").exists()


def _on_host(log: Path, *command: str) -> list[str]:
    return [sys.executable, "-m", "engines.on_host", "1", str(log), *command]


def test_a_node_does_not_see_what_mpirun_calls_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node1.log"
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}
    done = subprocess.run(_on_host(log, "env"), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "node 1 begins\nnode 1 ends with 0\n")
    assert "PATH=" in log.read_text()
    assert "OMPI_" not in log.read_text()
    assert "PMIX_" not in log.read_text()


@pytest.mark.parametrize(("code", "for_mpirun"), [(1, 0), (2, 2), (75, 0)])
def test_mpirun_ends_all_nodes_only_when_one_refuses(tmp_path: Path, code: int, for_mpirun: int) -> None:
    done = subprocess.run(_on_host(tmp_path / "log", "sh", "-c", f"exit {code}"), capture_output=True, text=True)
    assert done.returncode == for_mpirun
    assert done.stdout.endswith(f"node 1 ends with {code}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_node_is_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    node = subprocess.Popen(_on_host(tmp_path / "log", "sleep", "60"), stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    assert node.stdout.readline() == "node 1 begins\n"
    node.send_signal(number)
    assert node.communicate(timeout=30)[0] == "node 1 ends with 143\n"


def test_a_node_ends_with_the_daemon_that_started_it(tmp_path: Path) -> None:
    line = _on_host(tmp_path / "log", "sh", "-c", "sleep 60; true", str(tmp_path))
    daemon = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *line])
    wait_until(lambda: len(processes_of(tmp_path)) == 3, "the node's command")
    daemon.kill()
    daemon.wait()
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")
