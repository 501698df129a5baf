"""The interface of every task: data by sample number, a model, a loss that adds up, and metrics.

A task knows nothing of ranks or batch sizes. The training loop names the samples that belong together, and the task
answers with sums over them, never with means, so that any split of a batch gives the same total.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, get_args, runtime_checkable

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Split = Literal["train", "validation"]


class TaskInputError(ValueError):
    """A task cannot use its input; the message names the offending value and says what to do."""


class TaskSettings(BaseModel):
    """A task's own options; each field is a command-line option of the same name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def fetched(self) -> tuple[str, ...]:
        """Names the options whose values would be downloaded.

        A checkpoint may come from a stranger. On resume, these options must therefore be given again on the command
        line, and are not taken from the checkpoint.

        Returns:
            Names of fields; none by default.
        """
        return ()

    def of_race(self) -> dict[str, Any]:
        """Returns what a race sets unless the user does: a job whose time divides as that of real jobs does.

        Returns:
            Values by the names of fields; none by default.
        """
        return {}


# Metrics that count one class only, the positive one.
CLASS_METRICS = ("f1", "precision", "recall", "roc_auc")
_LONGEST_LABEL = 30


@dataclass(frozen=True)
class Overview:
    """A summary of a task's data, shown before the training begins.

    Attributes:
        rows: Pairs of a heading and a line of text; an empty heading continues the row above.
        warnings: What a user should know before the training takes its time, a sentence each.
    """

    rows: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Samples made ready for one forward pass.

    Attributes:
        tensors: The model's inputs and the targets, by name.
        num_tokens: How many tokens the samples have together, without padding; None where samples have no tokens.
        num_positions: How many positions the model computes, padding included; None where samples have no tokens.
        longest: How many tokens the longest sample has, where the model needs to know it.
        seed: The same for all samples of an optimizer step, whichever rank computes them; what a task draws from it and
            from the number of a sample does not depend on how the samples are laid out.
    """

    tensors: dict[str, torch.Tensor]
    num_tokens: int | None = None
    num_positions: int | None = None
    longest: int = 0
    seed: int = 0

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to a device.

        Args:
            device: The device of the model. A copy from pinned memory to a GPU is asynchronous.

        Returns:
            A new batch; this one is unchanged.
        """
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return replace(self, tensors=moved)

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked memory; torch's DataLoader calls this when it feeds a GPU.

        See "Memory Pinning" in https://docs.pytorch.org/docs/stable/data.html.

        Returns:
            A new batch; this one is unchanged.
        """
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return replace(self, tensors=pinned)


_Collate = TypeVar("_Collate", bound=Callable[..., Batch])


def draws_nothing(collate: _Collate) -> _Collate:
    """Marks a `collate` or `collate_packed` that uses none of the global generators of torch, numpy and Python.

    In training, these are then not seeded before it, which saves 20 us for each micro-batch. A method that overrides a
    marked one, or wraps it, is not marked unless it is decorated, too; one that augments samples must not be.
    """
    collate.__dict__["draws_nothing"] = collate
    return collate


class Task(ABC):
    """One training task.

    The constructor only stores the settings. `prepare` then validates the input and builds what is built once; every
    other method may rely on it.

    With --dataloader-num-workers, the task and its attributes are pickled and sent to each worker at the start of each
    epoch. `__getstate__` should leave out what is large or consists of many tensors, so that the worker makes it again
    or reads it from files: each tensor takes one of the at most 256 file descriptors that a worker can be sent.

    Args:
        settings: An instance of the class's own `Settings`.
    """

    name: ClassVar[str]
    """The name of the task in records and messages."""

    Settings: ClassVar[type[TaskSettings]]
    """The options of the task."""

    metric_names: tuple[str, ...] = ()
    """What `metrics` computes, so that any other name is refused before any work; empty if that is not known.
    Where it depends on the data, the class names all metrics and `prepare` narrows them down."""

    model_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    """The files that `save` writes, as names or patterns: a user's file of such a name is noticed before any work."""

    has_batch_norm: ClassVar[bool] = False
    """Whether the model has BatchNorm, without which --sync-batchnorm is refused before any work."""

    imported_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that methods of the task import, and that take long. A starter whose ranks are copies of one process
    imports them there, before the copies are made; a module must not depend on the rank."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def prepare(self) -> None:
        """Reads and validates the input, and fills the cache.

        The launcher calls it once. Then every rank calls it, and finds the cache. Both happen before a process group
        exists: long work inside a group would run into its timeout.

        Raises:
            TaskInputError: The input cannot be used.
        """

    @abstractmethod
    def num_samples(self, split: Split) -> int:
        """Counts the samples of a split.

        Args:
            split: "train" or "validation".

        Returns:
            A number n of at least 1; the samples are numbered from 0 to n - 1.
        """

    def costs(self, split: Split) -> npt.NDArray[np.int64] | None:
        """Estimates how much there is to compute for each sample, so that ranks can be given equal work.

        Args:
            split: "train" or "validation".

        Returns:
            For each sample a positive number, in any unit, which grows with its length; None where all samples cost
            the same, unless a task overrides this.
        """
        return None

    @property
    @abstractmethod
    def default_learning_rate(self) -> float:
        """The learning rate that is used without --learning-rate."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model on the CPU.

        Returns:
            A model whose random weights are drawn from torch's default generator, which the caller has seeded.
        """

    @abstractmethod
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Makes one batch.

        It may draw from the global generators of torch, numpy and Python, which are seeded before, so that the same
        samples are drawn in any worker and after a resumption. If it does not, mark it with `draws_nothing`.

        Args:
            split: The split that the samples belong to.
            sample_ids: At least one sample number; the batch keeps their order.

        Returns:
            A batch on the CPU.
        """

    def num_targets(self, split: Split, sample_ids: Sequence[int]) -> int:
        """Counts the terms of the loss: the number that a mean over these samples divides by.

        Args:
            split: The split that the samples belong to.
            sample_ids: At least one sample number.

        Returns:
            The number of samples, unless a task overrides this: where the loss is one over tokens, for example.
        """
        return len(sample_ids)

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Computes the loss.

        Call torch's functions through their module (`nn.functional.cross_entropy`). Mixed precision that replaces
        functions in that module, as Apex's O1 does, misses a function imported by its own name.

        Args:
            model: The model, possibly inside a backend's wrapper.
            batch: A batch on the model's device.

        Returns:
            The sum over the targets of the batch: a tensor without dimensions, in float32 or float64.
        """

    @abstractmethod
    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Computes what `metrics` needs to know of each sample.

        Args:
            model: The model in evaluation mode, without a backend's wrapper.
            batch: A batch of B samples on the model's device.

        Returns:
            A float64 tensor [B, `num_evaluation_columns`].
        """

    @property
    @abstractmethod
    def num_evaluation_columns(self) -> int:
        """The number of columns of `evaluation_rows`, at least 1."""

    @abstractmethod
    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Computes the metrics of a whole split.

        Args:
            rows: The rows of all N samples in their order: float64 [N, `num_evaluation_columns`].

        Returns:
            Each metric by its name; None for a metric that is not defined on these samples.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Collects facts about data and model for the record of the run: sizes, labels, balance.

        Two of these facts are shown beside the metrics: `positive_label`, the class that CLASS_METRICS are about, and
        `baseline`, a trivial model, whose `answer` says what it predicts and whose `metrics` say how good that is.

        Nodes must agree on all of them. Among them may be `data_digest`, a digest of all samples: files may then lie at
        other paths on each node, as settings of type Path and the fact `data` say.

        Returns:
            Values that can be written as JSON.
        """

    def overview(self) -> Overview:
        """Summarises the data; the launcher shows this before any rank starts.

        Returns:
            The number of samples in each split, unless a task overrides this.
        """
        counts = [f"{self.num_samples(split):,} {split}" for split in get_args(Split)]
        return Overview(rows=(("samples", ", ".join(counts)),))

    @abstractmethod
    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the trained model in a format that other programs can load.

        Args:
            model: The model as `build_model` returned it, without a backend's wrapper.
            directory: An existing directory; the files are those of `model_files`.
        """


@runtime_checkable
class PackedData(Protocol):
    """What a task may also have: batches whose samples follow one another without padding between them."""

    def packing_refusal(self) -> str | None:
        """Returns why the model cannot be given such batches; None if it can. `prepare` has been called."""

    def collate_packed(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Makes such a batch, as `collate` makes another; `loss_sum` and `evaluation_rows` take both.

        Args:
            split: The split that the samples belong to.
            sample_ids: At least one sample number.

        Returns:
            A batch on the CPU.
        """


@runtime_checkable
class HuggingFaceData(Protocol):
    """What a task may also have: its samples as Hugging Face's libraries take them, so that these can train on them.

    The model of such a task takes the padded columns of the dataset by name, besides `labels`, and returns a loss.
    """

    def hugging_face_dataset(self, split: Split) -> Dataset:
        """Opens the samples of a split.

        Args:
            split: "train" or "validation".

        Returns:
            Samples in the order of their numbers, with the columns `input_ids` and `label`.
        """

    def hugging_face_model(self) -> PreTrainedModel:
        """Builds the model, with the weights of `build_model`, as transformers has it."""

    def hugging_face_tokenizer(self) -> PreTrainedTokenizerBase:
        """Loads the tokenizer, which pads the samples of a batch."""


def facts_of(task: Task) -> dict[str, Any]:
    """Returns what a task tells of data and model, as it is read back from a file: tuples are lists, keys are strings.

    Raises:
        TypeError: A value cannot be written as JSON.
    """
    try:
        facts: dict[str, Any] = json.loads(json.dumps(task.describe()))
    except (TypeError, ValueError) as error:
        raise TypeError(f"describe() of the task returns what cannot be written as JSON: {error}") from error
    return facts


def metric_title(name: str, positive_label: str | None) -> str:
    """Writes the name of a metric for people, with the class that it is about.

    Args:
        name: The metric's name.
        positive_label: The positive class, if there is one.

    Returns:
        For example "f1 (positive: fraud)".
    """
    if positive_label is None or name not in CLASS_METRICS:
        return name
    return f"{name} (positive: {shown_label(positive_label)})"


def shown_label(label: str) -> str:
    """Writes a label for people.

    Args:
        label: Any text.

    Returns:
        The label, cut if it is long, and in quotes where white space or control characters would mislead.
    """
    short = label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 3]}..."
    return short if short and short.isprintable() and short == short.strip() else repr(short)
