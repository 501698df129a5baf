"""The interface every task implements: data by sample number, a model, an additive loss, and metrics.

A task knows nothing of ranks or batches sizes. The loop tells it which samples belong together;
it answers with sums over them, never with means, so that any split of a batch gives the same total.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch
    from torch import nn

Split = Literal["train", "validation"]


class TaskInputError(ValueError):
    """Input a task cannot work with; the text names the offending value and a remedy."""


class TaskSettings(BaseModel):
    """A task's own options; each field is a command-line option of the same name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def fetched(self) -> tuple[str, ...]:
        """The options whose values would be fetched from the network: a checkpoint's word is not enough for that."""
        return ()


# Metrics that count one class only, the positive one.
CLASS_METRICS = ("f1", "precision", "recall", "roc_auc")
_LONGEST_LABEL = 30


@dataclass(frozen=True)
class Overview:
    """What a task's data are, to be shown before anything is trained on them.

    Attributes:
        rows: A heading and a line of text each; an empty heading continues the row before.
        warnings: What a user should know before the training takes its time, a sentence each.
    """

    rows: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Samples made ready for one forward pass.

    Attributes:
        tensors: What the model takes, first dimension the sample.
        num_tokens: Real tokens among all samples.
        num_positions: Token positions computed, padding included.
    """

    tensors: dict[str, torch.Tensor]
    num_tokens: int
    num_positions: int

    def to(self, device: torch.device) -> Batch:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return Batch(moved, self.num_tokens, self.num_positions)

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader when it feeds a GPU."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return Batch(pinned, self.num_tokens, self.num_positions)


class Task(ABC):
    """One training task.

    Constructing it only stores the settings. `prepare` then validates the input and builds what
    can be built once; the remaining methods need it to have returned.

    With --dataloader-num-workers, the task and its attributes are pickled to each worker at the start of each epoch.
    What is large, or consists of many tensors, should be left out by `__getstate__` and made again when it is missing,
    or read from files: each tensor takes one of the at most 256 file descriptors that a worker can be sent.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[TaskSettings]]
    metric_names: tuple[str, ...] = ()
    """What `metrics` computes, so that another name is refused before any work; empty where that is not known.
    Where it depends on the data, the class names all and `prepare` sets it to those that will be computed."""

    model_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    """What `save` writes, as names or patterns, so that a user's file in its place is noticed before any work."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def prepare(self) -> None:
        """Reads and validates the input, building caches in one process at a time.

        It runs in the launcher and again, then finding the cache, in every rank, always before a
        process group exists: long work inside a group would run into its timeout.

        Raises:
            TaskInputError: The input cannot be used.
        """

    @abstractmethod
    def num_samples(self, split: Split) -> int:
        """The number of samples; valid sample numbers are 0 to this, exclusive."""

    @property
    @abstractmethod
    def default_learning_rate(self) -> float:
        """The learning rate to use when none is asked for."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model on the CPU, its random weights drawn from torch's default generator."""

    @abstractmethod
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Makes one batch of at least one sample."""

    def num_targets(self, split: Split, sample_ids: Sequence[int]) -> int:
        """Counts the terms of the loss in these samples: what a mean over them divides by."""
        return len(sample_ids)

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the sum of the loss over the batch's targets, 0-d, at least float32.

        Functions of torch are to be called through their module (`nn.functional.cross_entropy`): mixed
        precision that replaces functions there, as that of Apex does, misses a name imported before.
        """

    @abstractmethod
    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns what `metrics` needs to know of each sample, as float64 [batch, `num_evaluation_columns`]."""

    @property
    @abstractmethod
    def num_evaluation_columns(self) -> int: ...

    @abstractmethod
    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Computes the metrics of a whole split from `rows` [samples, columns]; None where undefined."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts about data and model for the run record: sizes, labels, balance.

        Two of them are shown where there are metrics: `positive_label`, the class that CLASS_METRICS are about, and
        `baseline`, of which `answer` says what a trivial model answers and `metrics` what that is worth.
        """

    def overview(self) -> Overview:
        """Says what the data are; the launcher shows it before any rank starts."""
        counts = [f"{self.num_samples(split):,} {split}" for split in get_args(Split)]
        return Overview(rows=(("samples", ", ".join(counts)),))

    @abstractmethod
    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the trained model into an existing directory, in a format that others can load."""


def metric_title(name: str, positive_label: str | None) -> str:
    """Names a metric for people, with the class that it is about."""
    if positive_label is None or name not in CLASS_METRICS:
        return name
    return f"{name} (positive: {shown_label(positive_label)})"


def shown_label(label: str) -> str:
    """Shows a label as it is, or in quotes where blanks or control characters would mislead; long ones are cut."""
    short = label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 3]}..."
    return short if short and short.isprintable() and short == short.strip() else repr(short)
