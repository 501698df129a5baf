"""Jobs of several nodes, here on one machine: what they compute, who writes, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.errors import UsageError
from launch.nodes import ALONE, Nodes, interface, own_address, settle_nodes
from launch.starters.interface import PROJECT_DIRECTORY
from tests.forked.client import ForkedJob
from tests.launching import (
    OF_EACH_STARTER,
    ending,
    free_port,
    lockstep,
    processes_of,
    require_backend,
    start_lockstep,
    train,
    trains,
    wait_until,
)
from tests.sparing import in_ci

pytestmark = [pytest.mark.launchers, pytest.mark.slow]

OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1", "--num-processes", "2")
# Accelerate's launcher is torchrun's agent, which starts DDP on several nodes.
IN_CI = in_ci([name for name in OF_EACH_STARTER if name != "accelerate"], OF_EACH_STARTER)


def _run_nodes(
    backend: str,
    place: Path,
    *options: str,
    of_last: tuple[str, ...] = (),
    last_path: Path | None = None,
    directories: tuple[Path | None, Path | None] = (None, None),
    asked_to_stop: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Starts two nodes at once, the last with some options and a place for packages more, and returns how each ended.

    Each is started in its directory of `directories`, if that is one.
    With `asked_to_stop`, the command line of the last one is sent SIGTERM once its rank is training.
    """
    place_of_meeting = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port())

    def start(node_rank: int) -> subprocess.Popen[str] | ForkedJob:
        where = ("--node-rank", str(node_rank), "--output-dir", str(place / f"node{node_rank}"))
        here = directories[node_rank]
        if node_rank == 0:
            return start_lockstep(backend, *options, *place_of_meeting, *where, cwd=here)
        env = {"PYTHONPATH": f"{last_path}:{PROJECT_DIRECTORY}"} if last_path else {}
        return start_lockstep(backend, *options, *place_of_meeting, *where, *of_last, env=env, cwd=here)

    with ending(start(1)) as last, ending(start(0)) as first:
        if asked_to_stop:
            wait_until(lambda: trains(place / "node1"), "a rank of the last node in training")
            last.send_signal(signal.SIGTERM)
        # At once, since one would wait for somebody to read what it prints.
        with ThreadPoolExecutor(2) as readers:
            outputs = [*readers.map(lambda job: job.communicate(timeout=600), (first, last))]
        codes = [first.returncode, last.returncode]
    return [
        subprocess.CompletedProcess([], -1 if code is None else code, *output)
        for code, output in zip(codes, outputs, strict=True)
    ]


# New processes compute it on hosts of their own: tests/test_engines.py, tests/test_slurm.py.
@pytest.mark.parametrize("backend", OF_EACH_STARTER)
def test_two_nodes_compute_what_one_does(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    alone = train(backend, tmp_path / "alone", *OPTIONS)
    # Nodes may have different allocators installed.
    done = _run_nodes(backend, tmp_path, *OPTIONS, of_last=("--allocator", "glibc"))
    assert [outcome.returncode for outcome in done] == [0, 0], done[0].stderr + done[1].stderr
    (path,) = tmp_path.glob("node*/record.json")
    together = json.loads(path.read_text())
    assert [rank["weights_sha256"] for rank in together["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert [step["loss"] for step in together["steps"]] == [step["loss"] for step in alone["steps"]]
    # The number on the machine, which is not the rank.
    assert [(rank["rank"], rank["local_rank"]) for rank in together["ranks"]] == [(0, 0), (1, 0)]
    other = 1 - int(path.parent.name.removeprefix("node"))
    assert f"node {other} has finished; the model and the record are on the node of rank 0" in done[other].stdout


def test_nodes_that_were_told_different_things_are_not_one_job(tmp_path: Path) -> None:
    done = _run_nodes("ddp", tmp_path, *OPTIONS, of_last=("--seed", "7"))
    assert [outcome.returncode for outcome in done] == [1, 1]
    for outcome in done:
        assert "nodes differ in seed: " in outcome.stderr
        assert "give each the same command" in outcome.stderr
    assert not list(tmp_path.glob("node*/model.safetensors"))


def test_nodes_with_different_versions_are_not_one_job(tmp_path: Path) -> None:
    (tmp_path / "transformers-9.9.9.dist-info").mkdir()
    (tmp_path / "transformers-9.9.9.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 9.9.9\n")
    done = _run_nodes("ddp", tmp_path, *OPTIONS, last_path=tmp_path)
    assert [outcome.returncode for outcome in done] == [1, 1]
    for outcome in done:
        assert "nodes differ in the version of transformers: " in outcome.stderr
        assert "'9.9.9' where rank 1 is" in outcome.stderr


@pytest.mark.parametrize("is_same", [True, False])
def test_files_at_other_paths_must_have_the_same_rows(tmp_path: Path, is_same: bool) -> None:
    """Those that differ have equally many rows, of the same labels and lengths."""
    for node, word in enumerate(("good", "good" if is_same else "fine")):
        (tmp_path / f"files{node}").mkdir()
        rows = f"a {word} film,1\na bad film,0\n" * 8
        (tmp_path / f"files{node}" / "rows.csv").write_text(f"text,label\n{rows}")
    files = ("--train-file", "rows.csv", "--validation-file", "rows.csv", "--vocab-size", "200", "--max-steps", "2")
    directories = (tmp_path / "files0", tmp_path / "files1")
    ranks = ("--threads-per-rank", "1", "--num-processes", "2")
    done = _run_nodes("ddp", tmp_path, *files, *ranks, directories=directories)
    assert [outcome.returncode for outcome in done] == ([0, 0] if is_same else [1, 1]), done[0].stderr
    for outcome in () if is_same else done:
        assert "nodes differ in data (data_digest): '" in outcome.stderr
        assert "the same files" in outcome.stderr
        assert max(map(len, outcome.stderr.splitlines())) < 400
    assert len(list(tmp_path.glob("node*/model.safetensors"))) == is_same


@pytest.mark.parametrize("backend", IN_CI)
def test_a_node_that_nobody_joins_gives_up(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    options = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port(), "--timeout", "5")
    done = lockstep(backend, *OPTIONS, *options, "--output-dir", tmp_path / "run", timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"lockstep: {backend} failed: " in done.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "failed"


REFUSALS = {
    "no-address": ("ddp --num-nodes 2", "--num-nodes 2", "--master-addr"),
    "address-unknown": ("ddp --num-nodes 2 --master-addr nowhere.invalid", "nowhere.invalid", "cannot be resolved"),
    "address-of-another": ("ddp --num-nodes 2 --master-addr 192.0.2.1", "192.0.2.1", "does not have this address"),
    "node-too-high": ("ddp --num-nodes 2 --node-rank 2 --master-addr 127.0.0.1", "--node-rank 2", "--num-nodes"),
    "address-alone": ("ddp --master-addr 127.0.0.1", "--master-addr 127.0.0.1", "--num-nodes"),
    "uneven": (
        "ddp --num-nodes 3 --num-processes 4 --master-addr 127.0.0.1",
        "--num-processes 4 is not a multiple of --num-nodes 3",
        "multiple of 3",
    ),
    "method": ("ddp --num-nodes 2 --master-addr 127.0.0.1 --start-method spawn", "spawn", "torchrun"),
    "method-horovod": (
        "horovod --num-nodes 2 --master-addr 127.0.0.1 --start-method horovodrun",
        "horovodrun",
        "horovod-node",
    ),
    "one-process": (
        "single --num-nodes 2 --master-addr 127.0.0.1",
        "single cannot run on several nodes",
        "use one node",
    ),
    "no-route": ("ddp --num-nodes 2 --master-addr 255.255.255.255", "255.255.255.255", "no route to it"),
    "none": ("ddp --num-nodes 0", "--num-nodes 0", "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    require_backend(arguments.split()[0])
    done = lockstep(*arguments.split(), "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
        done = lockstep("ddp", *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert f"--master-port {port}: is not free" in done.stderr


def test_addresses_and_interfaces() -> None:
    assert settle_nodes(1, 0, None) == ALONE
    assert own_address(ALONE) == "127.0.0.1"
    assert interface(ALONE) == "lo"
    assert settle_nodes(2, 1, "localhost") == Nodes(2, 1, "127.0.0.1")
    with pytest.raises(UsageError, match="cannot be resolved"):
        settle_nodes(2, 0, "x" * 300)


@pytest.mark.parametrize("backend", IN_CI)
def test_nodes_start_again_together(tmp_path: Path, backend: str) -> None:
    """A rank of one node dies; both start again, from the checkpoint that only one of them has."""
    require_backend(backend)
    options = (*OPTIONS, "--task", "tests.faulty:DyingTask", "--save-every", "2", "--max-restarts", "4")
    options = (*options, "--batching", "padded")
    train(backend, tmp_path / "whole", *options, "--task", "token-tagging")
    done = _run_nodes(backend, tmp_path, *options)
    assert [outcome.returncode for outcome in done] == [0, 0], done[0].stderr + done[1].stderr
    (path,) = tmp_path.glob("node*/record.json")
    record, whole = (json.loads(one.read_text()) for one in (path, tmp_path / "whole" / "record.json"))
    # Each start dies over its fifth batch; the last one had fewer to do.
    assert record["resumed_from"]["step"] >= 6
    assert record["steps"] == whole["steps"]
    assert record["ranks"][0]["weights_sha256"] == whole["ranks"][0]["weights_sha256"]


@pytest.mark.parametrize("backend", in_ci(["horovod"], OF_EACH_STARTER))
def test_one_node_is_asked_to_stop_and_both_do(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    options = (*OPTIONS, "--task", "tests.faulty:SlowTask", "--max-steps", "50", "--logging-steps", "5")
    done = _run_nodes(backend, tmp_path, *options, asked_to_stop=True)
    assert [outcome.returncode for outcome in done] == [75, 75], done[0].stderr + done[1].stderr
    assert len(list(tmp_path.glob("node*/checkpoints/*"))) == 1
    done = _run_nodes(backend, tmp_path, *options, "--resume", "latest")
    assert [outcome.returncode for outcome in done] == [0, 0], done[0].stderr + done[1].stderr
    # Only node 0 has the record by which it is seen that nothing is left to do.
    done = _run_nodes(backend, tmp_path, *options, "--resume", "latest")
    assert [outcome.returncode for outcome in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "is complete; there is nothing to resume" in done[0].stdout
    assert "node 0 says that this run has finished, so nothing was started here" in done[1].stderr


@pytest.mark.parametrize("backend", IN_CI)
def test_a_rank_that_fails_before_it_joins_is_named_on_all_nodes(tmp_path: Path, backend: str) -> None:
    """The others would wait for it, up to --timeout, and never know."""
    require_backend(backend)
    done = _run_nodes(backend, tmp_path, *OPTIONS, "--task", "tests.faulty:UnreadyTask")
    assert [outcome.returncode for outcome in done] == [1, 1], done[0].stderr + done[1].stderr
    failed = "OSError: the disk of this node is gone"
    (path,) = tmp_path.glob("node*/logs/rank1.error.json")
    node = int(path.parents[1].name.removeprefix("node"))
    assert re.match(rf"lockstep: {backend} failed: rank 1( \(.*\))?: {failed}", done[node].stderr)
    assert re.match(rf"lockstep: {backend} failed: node {node}: rank 1( \(.*\))?: {failed}", done[1 - node].stderr)
    record = json.loads((tmp_path / f"node{1 - node}" / "record.json").read_text())
    assert record["status"] == "failed"
    assert failed in record["error"]


@pytest.mark.parametrize("backend", IN_CI)
def test_a_hang_is_named_on_its_node_and_ends_both(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    options = (*OPTIONS, "--task", "tests.faulty:HangingTask", "--fault", "loops", "--hang-timeout", "5")
    done = _run_nodes(backend, tmp_path, *options)
    assert [outcome.returncode for outcome in done] == [1, 1], done[0].stdout + done[1].stdout
    named = rf"lockstep: {backend} failed: rank 1 \(\S+, step 5, data\): hangs: .* it is not waiting for another rank"
    # The other node is told.
    told = named.replace("rank 1", "node [01]: rank 1")
    for pattern in (named, told):
        assert sum(bool(re.match(pattern, outcome.stderr)) for outcome in done) == 1, done[0].stderr + done[1].stderr
    assert not [process for node in (0, 1) for process in processes_of(tmp_path / f"node{node}")]
