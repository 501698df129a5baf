"""A checkpoint is there whole or not at all, says so itself, and executes nothing."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.errors import UsageError
from launch.resume import latest_start
from records.checkpoint import (
    BestModel,
    Checkpoint,
    CheckpointError,
    CheckpointState,
    checkpoint_path,
    checkpoint_step,
    flatten_optimizer,
    list_checkpoints,
    prune,
    read_checkpoint,
    remove_unfinished,
    unflatten_optimizer,
    write_checkpoint,
)
from tests.launching import run_config

NUM_KILLS = 100


def _state(step: int, **changes: Any) -> CheckpointState:
    facts: dict[str, Any] = {
        "config": run_config("ddp", 2, Path("run"), micro_batch_size=4),
        "data": {"labels": ["bad", "good"]},
        "step": step,
        "num_updates": step,
        "evaluated_step": 0,
        "best": None,
        "evaluations_since_best": 0,
        "evaluations": [],
        "backend": {"scale": 65536.0},
        "optimizer_groups": [],
        "optimizer_scalars": {},
    }
    return CheckpointState.model_validate(facts | changes)


def _checkpoint(step: int, size: int = 1000) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(_state(step), {"model.weight": torch.rand(size, generator=generator)})


def _saved(directory: Path, *steps: int) -> list[Path]:
    paths = [checkpoint_path(directory, step) for step in steps]
    for path, step in zip(paths, steps, strict=True):
        write_checkpoint(path, _checkpoint(step))
    return paths


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, -0.0, float("nan"), float("inf"), 1e-45]),
        torch.tensor([1.0, -0.0, 3e-300], dtype=torch.float64),
        torch.rand(3, 5).to(torch.bfloat16),
        torch.rand(3, 5).half(),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.rand(4, 6).T,
    ],
    ids=["float32", "float64", "bfloat16", "float16", "0-d", "bool", "empty", "transposed"],
)
def test_every_bit_comes_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = checkpoint_path(tmp_path, 3)
    write_checkpoint(path, Checkpoint(_state(3, best=BestModel(step=2, value=0.1 + 0.2)), {"x": tensor.contiguous()}))
    read = read_checkpoint(path)
    assert read.state.best == BestModel(step=2, value=0.1 + 0.2)
    assert read.tensors["x"].dtype == tensor.dtype
    assert read.tensors["x"].shape == tensor.shape
    ours, theirs = (one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, read.tensors["x"]))
    assert torch.equal(ours, theirs)


def test_a_writer_says_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each tensor whose hash is known, and each piece that has reached the disk."""
    monkeypatch.setattr("records.files._PIECE_BYTES", 4096)
    notes: list[int] = []
    tensors = {"model.weight": torch.rand(4000), "model.bias": torch.rand(10)}
    write_checkpoint(checkpoint_path(tmp_path, 3), Checkpoint(_state(3), tensors), lambda: notes.append(1))
    size = checkpoint_path(tmp_path, 3).stat().st_size
    assert len(notes) == len(tensors) + -(-size // 4096)
    assert torch.equal(read_checkpoint(checkpoint_path(tmp_path, 3)).tensors["model.weight"], tensors["model.weight"])


def test_optimizer_state_survives_json() -> None:
    parameters = [torch.nn.Parameter(torch.rand(2, 2)), torch.nn.Parameter(torch.rand(2))]
    optimizer = torch.optim.AdamW([{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}])
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    before = optimizer.state_dict()
    tensors, scalars, groups = flatten_optimizer(before)
    state = _state(1, optimizer_groups=groups, optimizer_scalars=scalars)
    state = CheckpointState.model_validate_json(state.model_dump_json())
    after = unflatten_optimizer(tensors, state.optimizer_scalars, state.optimizer_groups)
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    assert all(torch.equal(after["state"][n][k], v) for n, facts in before["state"].items() for k, v in facts.items())


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    (path,) = _saved(tmp_path, 5)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    original = read_checkpoint(path)
    draw = random.Random(0)
    places = [*range(0, header), *(draw.randrange(header, len(whole)) for _ in range(200))]
    noticed = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        read = _read_or_refuse(path)
        noticed += read is None
        if read is not None:  # in the padding of the header, or in the case of an escape
            assert read.state == original.state
            assert torch.equal(read.tensors["model.weight"], original.tensors["model.weight"])
    assert noticed > 0.97 * len(places)


def _read_or_refuse(path: Path) -> Checkpoint | None:
    """Reads a file, or makes sure that it is refused in one line that names it."""
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    return None


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_torn_file_is_noticed(tmp_path: Path, share: float) -> None:
    (path,) = _saved(tmp_path, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="torn"):
        read_checkpoint(path)


class _Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def test_a_pickle_executes_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    path = checkpoint_path(tmp_path, 1)
    path.parent.mkdir()
    archive = io.BytesIO()
    torch.save({"model": _Payload(proof)}, archive)
    for content in (pickle.dumps(_Payload(proof)), archive.getvalue()):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a safetensors"):
            read_checkpoint(path)
    assert not proof.exists()


def test_a_checkpoint_of_another_version_is_told(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    state = _state(1).model_copy(update={"schema_version": 9})
    write_checkpoint(path, Checkpoint(state, {}))
    with pytest.raises(CheckpointError, match=r"was written by an incompatible version of Lockstep \(schema_version"):
        read_checkpoint(path)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    paths = _saved(tmp_path, 1, 2, 10, 9)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    start = latest_start(tmp_path)
    assert start is not None
    assert start.path == paths[3]
    assert [damage.partition(" (")[0] for damage in start.damaged] == [
        f"{paths[2]}: is incomplete or not a safetensors file"
    ]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"no checkpoint of .* can be used"):
        latest_start(tmp_path)
    assert latest_start(tmp_path / "elsewhere") is None


def test_old_ones_go_the_best_stays(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, keep=2, spare=1)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [5, 4, 1]


def _save_for_ever(directory: Path, first: int) -> None:
    os.setpgid(0, 0)
    step = first
    while True:
        write_checkpoint(checkpoint_path(directory, step), _checkpoint(step, 200_000))
        prune(directory, keep=2, spare=None)
        step += 1


@pytest.mark.slow
def test_killed_while_saving_at_a_hundred_moments(tmp_path: Path) -> None:
    """What is newest is whole after every SIGKILL, and never older than what a finished save had left."""
    draw = random.Random(int.from_bytes(os.urandom(4), "little"))
    forked = multiprocessing.get_context("fork")
    first, left_unfinished = 1, 0
    for _ in range(NUM_KILLS):
        saver = forked.Process(target=_save_for_ever, args=(tmp_path, first))
        saver.start()
        deadline = time.monotonic() + 30
        while not checkpoint_path(tmp_path, first).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        seen = max(checkpoint_step(path) for path in list_checkpoints(tmp_path))
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGKILL)
        saver.join()
        left_unfinished += bool(list((tmp_path / "checkpoints").glob(".*")))
        start = latest_start(tmp_path)
        assert start is not None
        assert not start.damaged
        step = start.state.step
        assert step >= seen
        assert torch.equal(
            read_checkpoint(start.path).tensors["model.weight"], _checkpoint(step, 200_000).tensors["model.weight"]
        )
        remove_unfinished(tmp_path)
        assert not list((tmp_path / "checkpoints").glob(".*"))
        first = step + 1
    assert left_unfinished > NUM_KILLS / 10  # many of them struck in the middle of a file
