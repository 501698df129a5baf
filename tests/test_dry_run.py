"""What --dry-run says of a run, and what it leaves alone."""

from __future__ import annotations

import io
import re
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from backends.registry import find_backend
from launch.dry_run import Measured, measure_in_a_process, show
from launch.options import read_options
from launch.resolve import _with_whole_batches, settle
from records.record import MemoryRecord
from records.sizes import RankSizes
from records.traffic import Payload, needed_bytes, sent_bytes
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.launching import EXAMPLES, lockstep, require_backend, run_config, train
from tests.sizes import compare
from tests.sparing import in_ci
from training.plan import Layout, MicroBatch, Plan, expected_imbalance, heaviest_share
from training.sizes import in_all_micro_steps

TAGGING = ("--task", "token-tagging", "--threads-per-rank", "1")


def _rows(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The rows of the table, by heading; the last one of several."""
    rows = [re.split(" {2,}", line.strip(), maxsplit=1) for line in done.stdout.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_4096_ranks_on_512_nodes(tmp_path: Path) -> None:
    options = ("--num-processes", "4096", "--num-nodes", "512", "--global-batch-size", "4096")
    done = lockstep("ddp", *options, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = _rows(done)
    assert rows["nodes"] == "512, 8 ranks on each; torchrun starts the ranks"
    assert rows["micro-batch"] == "1 sample"
    assert rows["epoch"] == "2 steps, 8,000 samples, 2.0 for a rank"
    assert rows["training"] == "8 steps"
    # A BERT of two layers has 4,386,178 weights, of which each rank sends 2 x 4095/4096.
    assert rows["weights"] == rows["gradients"] == "16.7 MiB"
    assert rows["optimizer"] == "33.5 MiB"
    assert rows["sends"] == "33.5 MiB in a step, by each rank, over a ring"
    assert rows["REFUSED"] == "--num-nodes 512: --master-addr is missing; give an address of node 0"
    assert list(tmp_path.iterdir()) == []


def test_a_port_is_refused_only_where_nodes_are_known_to_meet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = (
            "--num-nodes",
            "2",
            "--num-processes",
            "2",
            "--master-port",
            str(taken.getsockname()[1]),
            "--dry-run",
        )
        nowhere = lockstep("ddp", *options, cwd=tmp_path).stdout
        here = lockstep("ddp", *options, "--master-addr", "127.0.0.1", cwd=tmp_path).stdout
    assert "--master-addr is missing" in nowhere
    assert "is not free" not in nowhere
    assert "is not free" in here


def test_a_number_of_ranks_is_enough(tmp_path: Path) -> None:
    """Also on GPUs that this machine has not."""
    options = ("--num-processes", "4096", "--device", "cuda")
    done = lockstep("ddp", *options, "--dry-run", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert _rows(done)["global batch"] == "4,096 samples"
    text = " ".join(done.stdout.split())
    assert "REFUSED --global-batch-size 32 is not a multiple of the 4096 ranks" in text
    assert "REFUSED --device cuda: no GPU is visible here" in text
    assert "REFUSED --num-processes 4096: a node starts at most 1024 ranks" in text


@pytest.mark.parametrize(("micro_batch_size", "samples"), [((), 1), (("--micro-batch-size", "8"), 8)])
def test_each_rank_has_a_micro_batch(micro_batch_size: tuple[str, ...], samples: int) -> None:
    row, noted = find_backend("ddp"), list[str]()
    asked = read_options("ddp", row.settings, ["--num-processes", "4096", *micro_batch_size])
    assert _with_whole_batches(asked.run, 4096, noted).global_batch_size == samples * 4096
    assert len(noted) == 1
    assert _with_whole_batches(asked.run, 4096, None) == asked.run  # which a run refuses


def test_the_number_of_ranks_may_follow_from_that_of_the_nodes() -> None:
    row, noted = find_backend("ddp"), list[str]()
    asked = read_options("ddp", row.settings, ["--num-nodes", "3", "--device", "cpu", "--task", "token-tagging"])
    config, _, _ = settle("ddp", row, asked, started_at=0.0, noted=noted)
    assert (config.num_processes, config.global_batch_size) == (3, 3)
    assert any(one.startswith("--global-batch-size 32 is not a multiple of the 3 ranks") for one in noted), noted


def test_nodes_that_may_leave(tmp_path: Path) -> None:
    """One process takes the steps, which has neither nodes nor restarts."""
    options = ("--num-nodes", "2", "--min-nodes", "1", "--max-restarts", "2", *TAGGING, "--dry-run")
    done = lockstep("ddp", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _rows(done)["sends"].endswith("in a step, by each rank, over a ring")


REFUSED = {
    "global-batch": "ddp --num-processes 4096 --global-batch-size 48",
    "too-few-samples": "ddp --num-processes 64 --global-batch-size 64 --task token-tagging",
    "nodes": "ddp --num-processes 3 --num-nodes 2 --master-addr 127.0.0.1 --global-batch-size 3",
    "node-rank": "ddp --num-nodes 2 --node-rank 2 --master-addr 127.0.0.1",
    "one-process": "single --num-processes 2",
    "compression": "fsdp2 --grad-compression fp16",
    "too-many": "ddp --num-processes 1048577",
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_what_no_machine_can_run_is_refused_as_in_a_run(tmp_path: Path, words: str) -> None:
    dry, run = (lockstep(*words.split(), *more, cwd=tmp_path) for more in (["--dry-run"], []))
    assert dry.returncode == run.returncode == 2
    assert dry.stderr == run.stderr
    assert len(dry.stderr.splitlines()) == 1
    assert dry.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["verify ddp --dry-run", "contract ddp --dry-run", "ddp --dry-run=yes"])
def test_where_it_makes_no_sense_it_is_refused(tmp_path: Path, words: str) -> None:
    done = lockstep(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_file_can_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("dry_run: true\n")
    done = lockstep("ddp", "--config", "options.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no option 'dry_run'" in done.stderr


def test_a_run_of_more_ranks_than_a_node_starts_is_refused(tmp_path: Path) -> None:
    done = lockstep("ddp", "--num-processes", "2048", "--global-batch-size", "2048", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "--num-processes 2048: a node starts at most 1024 ranks" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "horovod",
        "apex --num-processes 4",
        "ddp --transport shared-memory",
        "accelerate --num-processes 4 --device cuda --precision fp16",  # in which it does not compute on a CPU
    ],
)
def test_what_cannot_be_pretended_is_computed(tmp_path: Path, words: str) -> None:
    done = lockstep(*words.split(), *TAGGING, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "in one process without communication" in _rows(done)["memory"]
    how = "ranks of one node share memory" if "shared-memory" in words else "computed for a ring"
    assert _rows(done)["sends"].endswith(how)
    assert ("REFUSED" in done.stdout) == words.startswith(("apex", "accelerate")) or "horovod is not" in done.stdout


@pytest.mark.slow
def test_a_task_and_a_backend_from_outside(tmp_path: Path) -> None:
    words = ("tests.by_hand:ByHandBackend", "--task", "spirals:SpiralsTask", "--dry-run")
    done = lockstep(*words, cwd=tmp_path, env=EXAMPLES)
    assert done.returncode == 0, done.stderr
    assert _rows(done)["epoch"] == "125 steps, 4,000 samples, 2,000.0 for a rank"


@pytest.mark.slow
def test_a_step_that_fails(tmp_path: Path) -> None:
    done = lockstep("ddp", "--task", "contract.awkward_tasks:UnusedParameterTask", "--dry-run", cwd=tmp_path)
    assert done.returncode == 1
    assert "a step of this run failed: ValueError: 1 parameter(s) got no gradient: idle" in done.stderr
    assert "weights" not in _rows(done)


@pytest.mark.slow
def test_a_resumed_run_shows_its_own_options_and_is_left_alone(tmp_path: Path) -> None:
    options = ("--save-every", "2", "--max-steps", "4", "--micro-batch-size", "8")
    run = tmp_path / "run"
    train("ddp", run, *TAGGING, *options)
    (run / "record.json").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = lockstep("ddp", "--output-dir", run, "--resume", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 2" in done.stdout
    rows = _rows(done)
    assert (rows["micro-batch"], rows["training"]) == ("8 samples", "4 steps")
    done = lockstep("ddp", "--output-dir", run, "--overwrite", "--dry-run", *TAGGING)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["fsdp2"], ["ddp", "fsdp2", "accelerate", "fabric"]))
def test_a_rank_takes_what_is_said(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    for size in compare(backend, 2, tmp_path, "--model", "bert-tiny"):
        assert abs(size.excess) <= 0.1, size


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["fsdp2"], ["ddp", "fsdp2"]))
def test_weights_that_are_parts_are_gathered_in_each_micro_step(tmp_path: Path, backend: str) -> None:
    """Two micro-steps are taken in both cases; all else that enters does so once in a step."""
    require_backend(backend)

    def entered(micro_batch_size: int) -> tuple[int, int]:
        measured = measure_in_a_process(run_config(backend, 2, tmp_path, micro_batch_size=micro_batch_size))
        assert measured.sizes is not None, measured.error
        assert measured.sizes.entered is not None
        gathered = sum(size for operation, size in measured.sizes.entered.items() if "gather" in operation)
        return gathered, sum(measured.sizes.entered.values()) - gathered

    (of_two, others), (of_eight, others_of_eight) = entered(8), entered(2)
    assert (of_eight, others_of_eight) == (4 * of_two, others)
    assert (of_two > 0) == (backend == "fsdp2")
    assert others > 0


def test_what_enters_in_each_micro_step_but_the_last() -> None:
    entered, in_first = {"allgather_base": 40, "reduce_scatter_base": 20}, {"allgather_base": 20}
    assert in_all_micro_steps(entered, {}, 1) == entered
    assert in_all_micro_steps(entered, in_first, 2) == entered
    assert in_all_micro_steps(entered, in_first, 5) == {"allgather_base": 100, "reduce_scatter_base": 20}


def test_it_fits_into_60_columns(tmp_path: Path) -> None:
    config = run_config("ddp", 2, tmp_path, micro_batch_size=16)
    task = TokenTagging(TokenTaggingSettings())
    task.prepare()
    sizes = RankSizes(
        memory=MemoryRecord(
            parameter_bytes=2**30, buffer_bytes=0, gradient_bytes=2**30, optimizer_bytes=2**31, activation_bytes=2000
        ),
        peak_bytes=2**32,
        resident_bytes=2**33,
        entered={"allreduce": 2**30},
        gradient_bytes=2**30,
        gradient_elements=2**28,
        model_bytes=2**30,
        checkpoint_bytes=3 * 2**30,
    )
    text = io.StringIO()
    terminal = Console(file=text, width=60, force_terminal=True, color_system=None)
    show(config, task, Measured(sizes, "cpu"), ["--master-addr node-0: cannot be resolved; give another"], terminal)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.split() == ["activations", "2.0", "KiB"] for line in lines)
    assert any(line.split()[:3] == ["sends", "1,024.0", "MiB"] for line in lines)


def _plan(batching: str, world_size: int, costs: np.ndarray | None) -> Plan:
    layout = Layout(batching, costs)  # type: ignore[arg-type]
    sizes = {"num_samples": 90, "global_batch_size": 24, "micro_batch_size": 3}
    return Plan(**sizes, world_size=world_size, seed=3, layout=layout)


def _positions(micro_batch: MicroBatch, batching: str, costs: np.ndarray | None) -> int:
    if costs is None:
        return len(micro_batch.sample_ids)
    own = costs[micro_batch.sample_ids]
    return int(own.sum() if batching == "packed" else own.max() * len(own))


@pytest.mark.parametrize("batching", ["packed", "sorted", "padded"])
@pytest.mark.parametrize("has_costs", [True, False])
@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_the_heaviest_micro_batch_is_that_of_all_ranks(batching: str, has_costs: bool, world_size: int) -> None:
    costs = np.random.default_rng(0).integers(1, 99, 90) if has_costs else None
    plan = _plan(batching, world_size, costs)
    shares = [plan.micro_batches(batch, rank) for batch in plan.epoch(0) for rank in range(world_size)]
    work = [_positions(one, batching, costs) for share in shares for one in share]
    assert work == [int(one) for batch in plan.epoch(0) for one in plan.work(batch).T.flatten()]
    found = heaviest_share(plan, num_steps=100)
    assert max(_positions(one, batching, costs) for one in found) == max(work)
    assert len(found) == min(2, max(map(len, shares)))
    assert expected_imbalance(plan) >= 1


def test_bytes_of_a_ring(tmp_path: Path) -> None:
    assert sent_bytes({"allreduce": 800, "broadcast": 80, "allgather_base": 400}, 4) == 3 / 4 * (2 * 800 + 80 + 400)
    config = run_config("ddp", 4, tmp_path, micro_batch_size=4)
    payload = Payload(gradient_bytes=800, gradient_elements=200)
    assert needed_bytes(config, payload) == 3 / 4 * 2 * 800
    halved = config.model_copy(update={"grad_compression": "bf16"})
    assert needed_bytes(halved, payload) == 3 / 4 * 2 * 400
    sharded = payload._replace(sharded_bytes=800)
    assert needed_bytes(config, sharded) == 3 / 4 * (800 + 2 * 2 * 800)
    kept = config.model_copy(update={"backend_settings": {"reshard_after_forward": False}})
    assert needed_bytes(kept, sharded) == 3 / 4 * (800 + 2 * 800)
