"""A task of your own, and not about text: tell which of two interleaved spirals a point of the plane lies on.

PYTHONPATH=docs/examples launch/run.sh ddp --task spirals:SpiralsTask

The problem is that of Lang and Witbrock, "Learning to Tell Two Spirals Apart" (1988).
"""

import math

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import nn

from tasks.interface import Batch, Overview, Task, TaskSettings, draws_nothing


class SpiralsSettings(TaskSettings):
    """Every field becomes an option of the command line: --num-points, --turns, --hidden-size."""

    num_points: int = Field(4000, ge=4, le=1_000_000, description="training points; a quarter as many validate")
    turns: float = Field(1.0, gt=0, le=10, description="turns of each spiral around the centre")
    hidden_size: int = Field(64, gt=0, le=4096, description="width of the two hidden layers")


class SpiralsTask(Task):
    """Two classes that no straight line separates."""

    name = "spirals"
    Settings = SpiralsSettings
    metric_names = ("loss", "accuracy")
    default_learning_rate = 1e-2
    num_evaluation_columns = 2

    def prepare(self):
        """Runs in the launcher and in every rank, which must all get the same data."""
        self.data = {"train": self._draw(self.settings.num_points, seed=1)}
        self.data["validation"] = self._draw(self.settings.num_points // 4, seed=2)

    def _draw(self, num_points, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(num_points) % 2
        radius = torch.rand(num_points, generator=generator).sqrt()  # equally dense everywhere in the circle
        angle = 2 * math.pi * self.settings.turns * radius + math.pi * labels
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        return points + 0.02 * torch.randn(num_points, 2, generator=generator), labels

    def num_samples(self, split):
        """Samples are numbered from 0 to this number, exclusive."""
        return len(self.data[split][1])

    def build_model(self):
        """Draws the weights from torch's default generator, which the caller has seeded."""
        size = self.settings.hidden_size
        return nn.Sequential(nn.Linear(2, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 2))

    @draws_nothing
    def collate(self, split, sample_ids):
        """Makes one micro-batch; the loop decides which samples belong to it."""
        points, labels = (tensor[list(sample_ids)] for tensor in self.data[split])
        return Batch({"points": points, "labels": labels})

    def loss_sum(self, model, batch):
        """A sum, not a mean: the loop divides by the size of the global batch, however it is split."""
        scores = model(batch.tensors["points"]).float()
        return nn.functional.cross_entropy(scores, batch.tensors["labels"], reduction="sum")

    def evaluation_rows(self, model, batch):
        """One row for each sample, with what the metrics need: its loss, and whether the answer is right."""
        scores, labels = model(batch.tensors["points"]).float(), batch.tensors["labels"]
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        return torch.stack([losses, scores.argmax(dim=1) == labels], dim=1).double()

    def metrics(self, rows):
        """Sees the rows of all samples of the split, whichever rank computed them."""
        loss, accuracy = rows.mean(dim=0).tolist()
        return {"loss": loss, "accuracy": accuracy}

    def describe(self):
        """Facts for record.json."""
        return {"num_samples": {split: self.num_samples(split) for split in self.data}}

    def overview(self):
        """What the launcher shows before the training begins."""
        return Overview(rows=(*super().overview().rows, ("spirals", f"two, of {self.settings.turns:g} turns")))

    def save(self, model, directory):
        """Writes the trained model into the output directory."""
        save_file(model.state_dict(), directory / "model.safetensors")
