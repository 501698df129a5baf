"""What holds for every engine, and network namespaces as several hosts on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends.capabilities import UnsupportedError
from backends.registry import BACKENDS
from compare.results import Results
from engines.command import _run, planned
from engines.following import Ended, Followed, exit_code_of
from engines.mpi import Mpi
from launch.errors import UsageError
from launch.run_directory import locked
from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import (
    ending,
    lockstep,
    needs_namespaces,
    processes_of,
    require_backend,
    start_lockstep,
    train,
    trains,
    wait_until,
)
from tests.networks import networks_gone

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1")
TWO_NODES = ("--engine", "netns", "--num-nodes", "2")
LOOPBACK = "127.0.0.1,127.0.0.2"


@needs_namespaces
@pytest.mark.slow
@pytest.mark.launchers
@pytest.mark.parametrize("backend", ["ddp", "horovod"])  # accelerate's launcher is torchrun's agent
def test_two_hosts_compute_what_one_does(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    run, go_on = tmp_path / "run", tmp_path / "go-on"
    options = (*OPTIONS, "--task", "tests.faulty:HeldTask")  # which is not held without --until
    alone = train(backend, tmp_path / "alone", *options, "--num-processes", "2")
    network = (*TWO_NODES, "--bandwidth", "1gbit")
    with ending(start_lockstep(backend, *network, *options, "--until", go_on, "--output-dir", run)) as job:
        wait_until((run / "node1" / "logs").exists, "the start of node 1")
        with networks_gone(run):
            go_on.touch()
            output, errors = job.communicate(timeout=600)
    assert job.returncode == 0, output + errors
    together = json.loads((run / "node0" / "record.json").read_text())
    assert [rank["weights_sha256"] for rank in together["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert [step["loss"] for step in together["steps"]] == [step["loss"] for step in alone["steps"]]
    assert together["environment"]["network"] == "2 network namespaces, 1gbit"
    assert {rank["hostname"] for rank in together["ranks"]} == {"n0", "n1"}
    assert f"the model and the record are in {run / 'node0'}" in output
    # The same command again would overwrite what is there.
    again = lockstep(backend, *TWO_NODES, *OPTIONS, "--output-dir", run)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


@needs_namespaces
@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_is_killed_ends_all_hosts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, "--max-steps", "5000", "--output-dir", run)) as job:
        wait_until(lambda: trains(run / "node1"), "a rank of node 1 in training")
        with networks_gone(run):
            os.kill(int((run / "node1" / "logs" / "rank1.pid").read_text().split()[0]), signal.SIGKILL)
            _, errors = job.communicate(timeout=300)
    assert job.returncode == 1
    assert "lockstep: node 1: ddp failed: rank 1" in errors
    assert not [one for node in (0, 1) for one in processes_of(run / f"node{node}")]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    with ending(start_lockstep("ddp", *TWO_NODES, *OPTIONS, "--max-steps", "5000", "--output-dir", run)) as job:
        wait_until(lambda: trains(run / "node1"), "a rank of node 1 in training")
        with networks_gone(run):
            job.send_signal(number)
            job.communicate(timeout=300)
    assert job.returncode == (75 if number == signal.SIGTERM else -number)
    wait_until(
        lambda: not [one for node in (0, 1) for one in processes_of(run / f"node{node}")], "the end of all processes"
    )


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    done = lockstep("ddp", *TWO_NODES, "--bandwidth", "10gbit", "--dry-run", "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "unshare" in done.stdout
    assert "tbf rate 10000000000bit" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 2),
        (("--resume",), 0),
        (("--resume", "--global-batch-size", "32"), 2),
        (("--resume", "latest", "--micro-batch-size", "8"), 0),
    ],
)
def test_a_resumed_run_has_the_batch_of_its_checkpoint(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    """Which is known where the nodes are: the default, 32, is no multiple of three ranks, but need not be meant."""
    done = lockstep("ddp", "--engine", "netns", "--num-nodes", "3", *options, "--dry-run", "--output-dir", tmp_path)
    assert done.returncode == code, done.stderr
    assert ("--global-batch-size 32" in done.stderr) == bool(code)


REFUSALS = {
    "engine": ("ddp --engine cloud", "--engine cloud", "netns"),
    "uneven": ("ddp --engine netns --num-nodes 3 --num-processes 4", "--num-processes 4", "a multiple of 3"),
    "node-rank": ("ddp --engine netns --node-rank 1", "--node-rank", "leave the option out"),
    "too-many": ("ddp --engine netns --num-nodes 91 --global-batch-size 91", "--num-nodes 91", "90"),
    "one-process": ("single --engine netns", "single", "--num-processes 2"),
    "no-unit": ("ddp --engine netns --bandwidth 25", "--bandwidth 25", "100mbit or 10gbit"),
    "nothing": ("ddp --engine netns --bandwidth 0gbit", "--bandwidth 0gbit", "is too little; give 1mbit to 1000gbit"),
    "negative": ("ddp --engine netns --latency=-5ms", "--latency -5ms", "200us"),
    "all-lost": ("ddp --engine netns --loss 200%", "--loss 200%", "less than or equal to 1"),
    "batch": ("ddp --engine netns --num-nodes 3", "--global-batch-size 32", "a multiple of 3"),
    "option": ("ddp --engine netns --bandwith 1gbit", "unknown option --bandwith", "--"),
    "config": ("ddp --engine netns --config options.yaml", "num_nodes", "--num-nodes"),
    "of-another-engine": ("ddp --engine netns --partition gpu", "unknown option --partition", "--"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    (tmp_path / "options.yaml").write_text("num_nodes: 3\n")
    done = lockstep(*arguments.split(), "--output-dir", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


PLANS_REFUSED = {
    "nodes-that-leave": (
        "ddp --engine netns --min-nodes 1 --max-restarts 1",
        "--min-nodes 1: engines start each node once",
        "start the nodes by hand",
    ),
    "fewer-gpus-than-ranks": (
        "horovod --engine slurm --num-nodes 2 --num-processes 8 --gpus-per-node 2 --global-batch-size 32",
        "--num-processes 8: horovod needs a GPU for each of the 4 ranks of a node",
        "2 are asked for",
    ),
    "kubernetes-cores": (
        "ddp --engine kubernetes --image X --num-nodes 2 --num-processes 8 --cpus 2",
        "--cpus 2",
        "a node runs 4 ranks",
    ),
}


for _engine, _cpus in {"slurm": "--cpus-per-task", "ray": "--cpus-per-node"}.items():
    PLANS_REFUSED |= {
        f"{_engine}-no-gpus": (f"ddp --engine {_engine} --device cuda", "--device cuda", "--gpus-per-node 1"),
        f"{_engine}-gpus-of-cpus": (
            f"ddp --engine {_engine} --device cpu --gpus-per-node 4",
            "--gpus-per-node 4",
            "leave",
        ),
        f"{_engine}-cores": (
            f"ddp --engine {_engine} --num-processes 8 {_cpus} 2",
            f"{_cpus} 2",
            "a node runs 4 ranks",
        ),
        f"{_engine}-of-gpus": (f"apex --engine {_engine}", "apex computes on GPUs only", "(--gpus-per-node 1)"),
    }


@pytest.mark.parametrize("case", PLANS_REFUSED)
def test_a_job_is_refused_before_anything_starts(case: str) -> None:
    arguments, *words = PLANS_REFUSED[case]
    with pytest.raises(UsageError) as refused:
        planned(arguments.split())[0].check()
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "arguments",
    [
        "accelerate --engine slurm --gpus-per-node 8 --precision fp16",
        "accelerate --engine ray --gpus-per-node 8 --precision fp16",
        "accelerate --engine kubernetes --image X --gpus 8 --precision fp16",
        # As if this Horovod had been built without GPUs.
        "horovod --engine kubernetes --image X --device cuda",
    ],
)
def test_nodes_with_gpus_are_not_judged_by_this_machine(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setattr("backends.horovod_settings._was_built_with", lambda function: False)
    engine, _ = planned([*arguments.split(), "--num-nodes", "2"])
    engine.check()
    with pytest.raises(UnsupportedError, match="accelerate cannot compute in fp16 on cpu"):
        planned(["accelerate", "--engine", "slurm", "--precision", "fp16"])
    with pytest.raises(UnsupportedError, match=r"supports only cpu \(it was built without NCCL; set it up"):
        BACKENDS["horovod"].declare().check(name="horovod", device="cuda", precision="fp32")
    with pytest.raises(UnsupportedError, match=r"^--device cuda: tests\.by_hand:ByHandBackend supports only cpu"):
        planned(["tests.by_hand:ByHandBackend", "--engine", "slurm", "--device", "cuda", "--gpus-per-node", "2"])


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 75], 75), ([75, 0], 75), ([75, 1], 1), ([2, 1], 2), ([1, 137], 1)]
)
def test_the_exit_code_is_that_of_the_first_failure(tmp_path: Path, codes: list[int], code: int) -> None:
    logs = [tmp_path / f"node{node_rank}.log" for node_rank in range(len(codes))]
    logs[0].with_suffix(".exit").write_text("9\n")  # of an earlier job
    ended = Ended(logs)
    for log, one in zip(logs, codes, strict=True):
        log.with_suffix(".exit").write_text(f"{one}\n")
        ended.look()
        assert (ended.seconds_since_failure() > 0) == (one not in (0, 75) and not ended.all)
    assert ended.all
    assert ended.code == code


def test_the_exit_code_where_nobody_knows_who_failed_first() -> None:
    assert exit_code_of([0, 0]) == 0
    assert exit_code_of([0, 75]) == 75
    assert exit_code_of([75, 1]) == 1
    assert exit_code_of([1, 2]) == 2
    assert exit_code_of([-9, 1]) == 137


def test_only_whole_new_lines_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / "node0.log", tmp_path / "node1.log"]
    logs[0].write_text("of an earlier job\n")
    followed = Followed(logs)
    with logs[0].open("a") as first:
        first.write("step 1\nste")
    logs[1].write_text("step 1\nlockstep: ddp failed\n")
    followed.show()
    shown = capsys.readouterr()
    assert shown.out == "step 1\n"
    assert shown.err == "lockstep: node 1: ddp failed\n"


@needs_namespaces
@pytest.mark.exhaustive  # the race between hosts of test_mpi
@pytest.mark.processes
def test_a_race_between_hosts(tmp_path: Path) -> None:
    """Its runs are compared with those of one process on the same machine, and bytes are counted on the interfaces."""
    race = tmp_path / "race"
    options = ("--task", "token-tagging", "--backends", "ddp", "--num-processes", "1,2", "--no-wait-for-idle")
    sizes = ("--repeats", "3", "--timed-steps", "12", "--diagnosis-steps", "10", "--no-collectives", "--no-limits")
    network = ("--engine", "netns", "--bandwidth", "100mbit")
    done = lockstep("compare", *network, *options, *sizes, "--output-dir", race, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.model_validate_json((race / "results.json").read_text())
    assert {result.group.machine for result in results.groups} == {None}  # of one machine
    groups = {result.group.num_processes: result for result in results.groups}
    assert "(2 network namespaces, 100mbit)" in groups[2].group.key
    assert "network" not in groups[1].group.key
    (ddp,) = groups[2].entrants
    assert ddp.parity.verdict in ("bitwise", "rounding"), ddp.parity.detail
    record = json.loads(next((race / "records").glob("diagnosis-*-ddp-2x-*-g32.json")).read_text())
    seen = record["ranks"][0]["diagnosis"]
    assert seen["interface"] == "eth0"
    # A ring of two ranks sends as many bytes as the gradients have; packets have headers.
    assert seen["gradient_bytes"] < seen["sent_bytes"][-1] < 2 * seen["gradient_bytes"] + 2000
    assert not list(race.glob("running/*"))


RACES = {
    "no-engine": ("--bandwidth 1gbit", "--bandwidth 1gbit", "--engine netns"),
    "tune": ("--engine netns --tune", "--tune", "--engine netns"),
    "peers": ("--engine netns --peers trainer", "--peers trainer", "--engine netns"),
    "bare": ("--engine netns --bare", "--bare: cannot race", "--engine netns"),
    "engine": ("--engine slurm", "--engine slurm", "'netns' or 'mpi'"),
    "hosts-of-no-engine": ("--hosts a,b", "--hosts a,b", "add --engine mpi"),
    "no-hosts": ("--engine mpi", "--hosts is missing", "this one first"),
    "slots": ("--engine mpi --hosts a:4,b:4", "--hosts a:4,b:4", "name the hosts alone"),
    "uneven": (f"--engine mpi --hosts {LOOPBACK} --num-processes 3", "--num-processes 3", "a multiple of 2"),
    "another-first": ("--engine mpi --hosts 192.0.2.1,127.0.0.1", "192.0.2.1 is another machine", "this one first"),
    "nowhere": ("--engine mpi --hosts 127.0.0.1,nowhere.invalid", "nowhere.invalid cannot be found", "its address"),
    "bandwidth": (f"--engine mpi --hosts {LOOPBACK} --bandwidth 1gbit", "--bandwidth 1gbit", "--engine netns"),
    "one-rank": ("--engine netns --bandwidth 1gbit --num-processes 1", "has no effect on a single rank", "--bandwidth"),
}


@pytest.mark.parametrize("case", RACES)
def test_a_race_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = RACES[case]
    done = lockstep("compare", *arguments.split(), "--output-dir", tmp_path / "race")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "race").exists()


@pytest.mark.parametrize(("name", "why"), [("", "is not writable"), ("x" * 300, "File name too long")])
def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    engine, _ = planned(["ddp", *TWO_NODES, "--output-dir", str(tmp_path / name)])
    monkeypatch.setattr(engine, "check_here", lambda: None)
    monkeypatch.setattr("engines.command.os.access", lambda *_: False)  # as for a user who is not root
    with pytest.raises(UsageError, match=f"{why}; choose another "):
        _run(engine)


@needs_namespaces
def test_two_commands_do_not_share_a_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):  # as by the first command
        done = lockstep("ddp", "--engine", "netns", *OPTIONS, "--output-dir", run)
    assert done.returncode == 2
    assert done.stderr == f"lockstep: --output-dir {run}: another run is using it; choose another directory\n"
    assert [*run.iterdir()] == []


_ASKED_TO_STOP_AT_ONCE = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupted(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "launch.guardian":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupted())
from engines import on_host
sys.argv = ["on_host", "0", sys.argv[1], "sleep", "60"]
sys.exit(on_host.main())
"""


def test_a_host_that_is_stopped_while_it_starts_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ASKED_TO_STOP_AT_ONCE, tmp_path / "node0.log"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=PROJECT_DIRECTORY)
    assert (done.returncode, done.stdout) == (0, "node 0 begins\nnode 0 ends with 143\n"), done.stderr


@pytest.mark.parametrize(
    ("said", "stopped", "code"),
    [
        ("", [signal.SIGINT], 130),
        ("node 0 begins\nnode 0 ends with 143\n", [signal.SIGTERM], 143),
        ("node 0 begins\nnode 1 begins\nnode 0 ends with 0\n", [signal.SIGTERM], 1),  # node 1 was lost
    ],
)
def test_hosts_that_mpirun_ended_before_they_began(
    tmp_path: Path, said: str, stopped: list[signal.Signals], code: int
) -> None:
    engine, _ = planned(["ddp", "--engine", "mpi", "--hosts", "127.0.0.1:1,127.0.0.2:1"])
    assert isinstance(engine, Mpi)
    (tmp_path / "mpirun.log").write_text(said)
    assert engine._judge(tmp_path / "mpirun.log", stopped) == code
