"""Checkpoints: one file each, of tensors and JSON only, written completely or not at all.

A checkpoint is a safetensors file (https://huggingface.co/docs/safetensors): the tensors of model,
optimizer and history, and in its metadata a JSON text with everything else and a SHA-256 of all of
it. Nothing in one is ever executed, and nothing in it depends on the backend or the world size.

It holds no state of random number generators: each is seeded from (seed, purpose, rank, step, micro-step), so
that the position and the seed are the state of all of them, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from records.config import RunConfig
from records.files import sync_file
from records.names import CHECKPOINTS_NAME
from records.record import EvaluationRecord, World
from records.tensor_file import TensorFacts, TensorFile, as_bytes, piece_of

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_STATE_KEY, _DIGEST_KEY = "lockstep", "sha256"


class CheckpointError(ValueError):
    """A file that is not a complete checkpoint; the text names it and says why."""


class BestModel(BaseModel):
    """The best evaluation so far, by --metric-for-best-model."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: int = Field(ge=1)
    value: float


class CheckpointState(BaseModel):
    """What a checkpoint holds besides tensors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: Literal[2] = 2
    config: RunConfig = Field(description="of the run that saved it")
    data: dict[str, Any] = Field(description="the task's facts about its data and model")
    step: int = Field(ge=1, description="optimizer steps taken, skipped ones counted: the position in the plan")
    num_updates: int = Field(ge=0, description="how often the learning-rate schedule advanced")
    evaluated_step: int = Field(ge=0, description="step of the last evaluation, 0 before the first")
    best: BestModel | None
    evaluations_since_best: int = Field(ge=0, description="what early stopping counts")
    evaluations: list[EvaluationRecord]
    worlds: list[World] = []
    backend: dict[str, Any] = Field(description="state of the loss scaler, in the words of torch's")
    optimizer_groups: list[dict[str, Any]] = Field(description="hyper-parameters and parameter numbers, as torch's")
    optimizer_scalars: dict[str, Any] = Field(description="what an optimizer keeps of a parameter besides tensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; its tensors are on the CPU, and their names begin with what they belong to."""

    state: CheckpointState
    tensors: dict[str, torch.Tensor]


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint that a run saves after this step."""
    return run_directory / CHECKPOINTS_NAME / f"step-{step:08d}.safetensors"


def list_checkpoints(run_directory: Path) -> list[Path]:
    """Returns the paths of the checkpoints of a run, the newest first; it does not read them."""
    found = [path for path in (run_directory / CHECKPOINTS_NAME).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


def checkpoint_step(path: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def write_checkpoint(path: Path, checkpoint: Checkpoint, progressed: Callable[[], None] = lambda: None) -> None:
    """Writes a checkpoint under another name and renames it once it is on the disk.

    Whenever the process or the machine stops, `path` holds its previous content or the complete new file.

    Args:
        path: Where it is to be.
        checkpoint: The checkpoint.
        progressed: Called now and then while the size of the unfinished file does not show that this goes on.

    Raises:
        OSError: It cannot be written; no part of it is left.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not path.parent.exists():
        path.parent.mkdir()  # alone: a run whose directory was moved away must not make it anew
        _sync(path.parent.parent)
    text = json.dumps(checkpoint.state.model_dump(mode="json"), allow_nan=False)
    metadata = {_STATE_KEY: text, _DIGEST_KEY: digest_of(text, checkpoint.tensors, progressed)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            save_file(checkpoint.tensors, unfinished, metadata)
        except SafetensorError as error:  # which also wraps the errors of the system
            raise OSError(_short(error)) from error
        sync_file(unfinished, progressed)
        unfinished.replace(path)
        _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


class CheckpointFile:
    """A checkpoint on the disk. It has been read once, to check its hash; its tensors are read where they are needed.

    Attributes:
        path: Where it is.
        text: The JSON text of everything but the tensors.
        state: What the text says.
        digest: The hash of the text and all tensors.
        facts: The tensors, sorted by name.
    """

    def __init__(self, path: Path) -> None:
        """Checks a file.

        Raises:
            CheckpointError: It cannot be read, is damaged, or is no checkpoint.
        """
        from safetensors import SafetensorError

        _check_file(path)
        self.path = path
        try:
            self._file = TensorFile(path)
            metadata = self._file.metadata
            if _STATE_KEY not in metadata or _DIGEST_KEY not in metadata:
                raise CheckpointError(f"{path}: is a safetensors file, but not a checkpoint")
            self.text, self.digest, self.facts = metadata[_STATE_KEY], metadata[_DIGEST_KEY], self._file.facts
            digest = ContentDigest(self.text)
            for name, facts in self.facts.items():
                digest.begin(name, facts)
                for piece in self._file.pieces(name):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        except CheckpointError:
            raise
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: is incomplete or not a safetensors file ({_short(error)})") from error
        if digest.hexdigest() != self.digest:
            raise CheckpointError(f"{path}: is damaged: its content does not match its hash")
        self.state = parse_state(self.text, str(path))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a tensor in pieces.

        Raises:
            OSError: They cannot be read.
        """
        return self._file.pieces(name)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Reads the tensors whose names begin with `prefix` and a dot, by the rest of their names.

        Raises:
            OSError: They cannot be read.
        """
        return {name: self.tensor(f"{prefix}.{name}") for name in without_prefix(prefix, self.facts)}

    def tensor(self, name: str) -> torch.Tensor:
        """Reads a tensor.

        Raises:
            OSError: It cannot be read.
        """
        tensor, begin = self.facts[name].empty(), 0
        content = as_bytes(tensor)
        for piece in self.pieces(name):
            content[begin : begin + len(piece)] = piece_of(piece)
            begin += len(piece)
        return tensor


def newest_checkpoint(run_directory: Path, damaged: list[str]) -> CheckpointFile | None:
    """Finds the newest checkpoint of a run that is not damaged; None if there is none.

    Args:
        run_directory: The directory of the run.
        damaged: What is wrong with newer ones is added to it.
    """
    for path in list_checkpoints(run_directory):
        try:
            return CheckpointFile(path)
        except CheckpointError as error:
            if not path.exists():  # its run is still running, and has a newer one by now
                return newest_checkpoint(run_directory, damaged)
            damaged.append(str(error))
    return None


def parse_state(text: str, name: str) -> CheckpointState:
    """Reads the JSON text of a checkpoint.

    Args:
        text: The text.
        name: What messages call the checkpoint.

    Raises:
        CheckpointError: It was written by an incompatible version.
    """
    try:
        return CheckpointState.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{name}: was written by an incompatible version of Lockstep ({where}: {first['msg']})"
        ) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint as a whole, and checks its hash.

    Raises:
        CheckpointError: It cannot be read or is damaged.
    """
    file = CheckpointFile(path)
    return Checkpoint(file.state, {name: file.tensor(name) for name in file.facts})


class ContentDigest:
    """A SHA-256 of the JSON text, then of name, type, shape and bytes of every tensor, in the order of names."""

    def __init__(self, text: str) -> None:
        self._digest = hashlib.sha256(text.encode())

    def begin(self, name: str, facts: TensorFacts) -> None:
        """The next bytes are those of this tensor."""
        self._digest.update(f"\0{name}\0torch.{facts.dtype}\0{list(facts.shape)}\0".encode())

    def update(self, content: Any) -> None:
        """Adds bytes, or anything that has the buffer protocol."""
        self._digest.update(content)

    def hexdigest(self) -> str:
        """Returns the hash of all so far."""
        return self._digest.hexdigest()


def digest_of(text: str, tensors: Mapping[str, torch.Tensor], progressed: Callable[[], None] = lambda: None) -> str:
    """Returns the hash of a whole checkpoint, and calls `progressed` after each tensor."""
    digest = ContentDigest(text)
    for name, tensor in sorted(tensors.items()):
        digest.begin(name, TensorFacts(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        digest.update(as_bytes(tensor).numpy().data)
        progressed()
    return digest.hexdigest()


def unfinished_checkpoints(run_directory: Path) -> list[Path]:
    """Returns the unfinished files of checkpoints, those that safetensors writes first among them."""
    patterns = (".step-*", ".tmp??????")
    return [path for pattern in patterns for path in (run_directory / CHECKPOINTS_NAME).glob(pattern)]


def remove_unfinished(run_directory: Path) -> None:
    """Removes the unfinished files of writers that were killed."""
    for path in unfinished_checkpoints(run_directory):
        path.unlink()


def prune(run_directory: Path, *, keep: int, spare: int | None) -> None:
    """Removes all but the `keep` newest checkpoints and that of the step `spare`."""
    for path in list_checkpoints(run_directory)[keep:]:
        if checkpoint_step(path) != spare:
            path.unlink(missing_ok=True)


def flatten_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[dict[str, Any]]]:
    """Splits an optimizer's state_dict into named tensors, other values by the same names, and its groups."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for number, facts in state["state"].items():
        for name, value in facts.items():
            (tensors if isinstance(value, torch.Tensor) else scalars)[f"{number}.{name}"] = value
    return tensors, scalars, [dict(group) for group in state["param_groups"]]


def unflatten_optimizer(
    tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The inverse of `flatten_optimizer`."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *scalars.items()):
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    # JSON has no tuples; Adam's betas are one.
    groups = [{name: tuple(value) if name == "betas" else value for name, value in group.items()} for group in groups]
    return {"state": state, "param_groups": groups}


def with_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors with `prefix` and a dot before their names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors whose names begin with `prefix` and a dot, by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _check_file(path: Path) -> None:
    """Refuses files that cannot be read to the end: pipes, devices, and files larger than the memory."""
    try:
        facts = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(facts.st_mode):
        raise CheckpointError(f"{path}: is not a file")
    if facts.st_size > _memory_bytes():
        raise CheckpointError(f"{path}: is larger than the memory of this machine")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _sync(path: Path) -> None:
    """Makes the system write the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
