"""A job without a device: gradients of BERT's sizes, and computing that only waits, as long as a device would take.

A GPU computes while the processor is free to communicate. This task does the same to a machine without one: each layer
waits until a device of the given speed would be done, and then has its gradients. So backends, networks and forecasts
can be tried with the traffic of a large model at the pace of accelerators, also with more ranks than there are cores.
What it learns is of no use: one number, from the means of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from tasks.interface import Batch, Split, Task, TaskSettings, draws_nothing
from tasks.text.models import PRESETS, VOCAB_SIZE

if TYPE_CHECKING:
    import torch
    from torch import nn


class PacedSettings(TaskSettings):
    """Whose gradients, and whose pace."""

    model: Literal["bert-tiny", "bert-mini", "bert-small", "bert-base", "bert-large"] = Field(
        "bert-mini", description="the model whose gradients are sent"
    )
    vocab_size: int = Field(VOCAB_SIZE, ge=1, le=1_000_000, description="rows of its embedding")
    samples_per_second: float = Field(
        100.0, gt=0, le=1e6, description="how many samples a device takes through both passes in a second"
    )
    num_train_samples: int = Field(4000, gt=0, le=10_000_000, description="training samples")
    num_validation_samples: int = Field(400, gt=0, le=10_000_000, description="validation samples")


class Paced(Task):
    """Fits a single number, as slowly as a model of BERT's shape would."""

    name = "paced"
    Settings = PacedSettings
    settings: PacedSettings
    metric_names = ("loss",)
    imported_modules: ClassVar[tuple[str, ...]] = ("tasks.paced_model",)

    def prepare(self) -> None:
        """Does nothing: samples follow from their numbers."""

    def num_samples(self, split: Split) -> int:
        """Counts the samples of a split."""
        return self.settings.num_train_samples if split == "train" else self.settings.num_validation_samples

    @property
    def default_learning_rate(self) -> float:
        """Small enough for AdamW and for plain SGD."""
        return 1e-3

    def build_model(self) -> nn.Module:
        """Builds a `PacedBert`."""
        from tasks.paced_model import PacedBert

        num_layers, hidden_size = PRESETS[self.settings.model]
        return PacedBert(
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=self.settings.vocab_size,
            seconds_per_sample=1 / self.settings.samples_per_second,
        )

    @draws_nothing
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Makes `inputs` and `targets`, float32 [B] each."""
        import torch

        numbers = torch.tensor(sample_ids, dtype=torch.float32)
        inputs = torch.sin(numbers if split == "train" else -1 - numbers)
        return Batch({"inputs": inputs, "targets": inputs + 1})

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sums half the squared errors."""
        from torch import nn

        found = model(batch.tensors["inputs"]).float()
        return 0.5 * nn.functional.mse_loss(found, batch.tensors["targets"], reduction="sum")

    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Gives the loss of each sample, float64 [B, 1]."""
        from torch import nn

        found = model(batch.tensors["inputs"]).float()
        return 0.5 * nn.functional.mse_loss(found, batch.tensors["targets"], reduction="none")[:, None].double()

    @property
    def num_evaluation_columns(self) -> int:
        """One, for the loss."""
        return 1

    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Computes the mean loss."""
        return {"loss": float(rows.mean())}

    def describe(self) -> dict[str, Any]:
        """Gives the numbers of samples."""
        return {
            "num_train_samples": self.num_samples("train"),
            "num_validation_samples": self.num_samples("validation"),
        }

    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the weights as safetensors."""
        from safetensors.torch import save_file

        save_file(model.state_dict(), directory / "model.safetensors")
