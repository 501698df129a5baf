"""A tiny task for proofs, in float64: tag every token of synthetic sentences.

It is small enough to be compared with a reference to the last digits, and awkward on purpose:
sentence lengths differ by a factor of twelve, some tokens carry no target, labels are spread
unevenly over the sample numbers, the embedding is tied to the output layer, and a weight is frozen.
A mean of means, wherever one hides, gives another gradient here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tasks.interface import Batch, Split, Task, TaskSettings

NUM_TAGS = 7
NO_TARGET = -100


class TokenTaggingSettings(TaskSettings):
    """How much synthetic data to make."""

    num_train_samples: int = Field(44, gt=0, le=1_000_000, description="synthetic training sentences")
    num_validation_samples: int = Field(23, gt=0, le=1_000_000, description="synthetic validation sentences")
    dtype: Literal["float64", "float32"] = Field("float64", description="of the parameters")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of the hidden layer")
    hidden_size: int = Field(12, gt=0, le=4096, description="width of the hidden layer")


class Tagger(nn.Module):
    """Embeds tokens, mixes neighbours, and scores tags with the embedding's own weights.

    Maps token numbers [batch, length] to scores [batch, length, NUM_TAGS].
    """

    def __init__(self, *, dtype: torch.dtype, dropout: float, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TAGS, hidden_size)
        self.mixer = nn.Linear(2 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, NUM_TAGS)
        self.output.weight = self.embedding.weight
        self.gain = nn.Parameter(0.5 + torch.rand(hidden_size), requires_grad=False)
        # Drawn at random, so that ranks start with different ones; one of them is in no state_dict.
        self.register_buffer("marks", torch.randint(0, 1000, (3,)))
        self.register_buffer("hidden_marks", torch.rand(3), persistent=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        left = nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        hidden = self.dropout(torch.tanh(self.mixer(torch.cat([embedded, left], dim=-1))))
        scores: torch.Tensor = self.output(hidden * self.gain)
        return scores


class TokenTagging(Task):
    """Tags tokens in float64, with a loss over tokens and not over samples."""

    name = "token-tagging"
    Settings = TokenTaggingSettings
    settings: TokenTaggingSettings
    metric_names = ("loss", "accuracy", "macro_f1")

    def prepare(self) -> None:
        self._samples = {
            "train": _sentences(self.settings.num_train_samples, seed=1),
            "validation": _sentences(self.settings.num_validation_samples, seed=2),
        }

    def num_samples(self, split: Split) -> int:
        return len(self._samples[split])

    @property
    def default_learning_rate(self) -> float:
        return 0.1

    def build_model(self) -> nn.Module:
        settings = self.settings
        return Tagger(dtype=getattr(torch, settings.dtype), dropout=settings.dropout, hidden_size=settings.hidden_size)

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        chosen = [self._samples[split][int(sample_id)] for sample_id in sample_ids]
        tokens = pad_sequence([tokens for tokens, _ in chosen], batch_first=True)
        tags = pad_sequence([tags for _, tags in chosen], batch_first=True, padding_value=NO_TARGET)
        return Batch({"tokens": tokens, "tags": tags}, sum(len(tokens) for tokens, _ in chosen), tokens.numel())

    def num_targets(self, split: Split, sample_ids: Sequence[int]) -> int:
        return sum(int((self._samples[split][int(i)][1] != NO_TARGET).sum()) for i in sample_ids)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        scores = model(batch.tensors["tokens"])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch.tensors["tags"].flatten(), reduction="sum")

    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        tags = batch.tensors["tags"]
        scores = model(batch.tensors["tokens"])
        losses = nn.functional.cross_entropy(scores.transpose(1, 2), tags, reduction="none").sum(dim=1)
        # Counted for each tag: targets, predictions among the targets, hits.
        is_target = (tags != NO_TARGET)[..., None]
        wanted = (tags[..., None] == torch.arange(NUM_TAGS, device=tags.device)) & is_target
        predicted = (scores.argmax(dim=-1)[..., None] == torch.arange(NUM_TAGS, device=tags.device)) & is_target
        counts = [count.sum(dim=1) for count in (wanted, predicted, wanted & predicted)]
        return torch.cat([losses[:, None].double(), *counts], dim=1)

    @property
    def num_evaluation_columns(self) -> int:
        return 1 + 3 * NUM_TAGS

    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Loss and accuracy add up over samples; macro F1, over the tags that occur, does not."""
        loss, *counts = rows.sum(dim=0)
        wanted, predicted, hits = torch.stack(counts).reshape(3, NUM_TAGS)
        f1 = (2 * hits / (wanted + predicted))[wanted > 0]
        return {
            "loss": float(loss / wanted.sum()),
            "accuracy": float(hits.sum() / wanted.sum()),
            "macro_f1": float(f1.mean()),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "num_train_samples": self.num_samples("train"),
            "num_validation_samples": self.num_samples("validation"),
        }

    def save(self, model: nn.Module, directory: Path) -> None:
        from safetensors.torch import save_model

        save_model(model, str(directory / "model.safetensors"))


def _sentences(num_samples: int, *, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draws (tokens, tags) pairs; early sentences are long and use few tags, late ones are short."""
    generator = torch.Generator().manual_seed(seed)
    sentences = []
    for index in range(num_samples):
        early = index < num_samples // 2
        length = int(torch.randint(8 if early else 1, 13 if early else 4, (1,), generator=generator))
        tokens = torch.randint(0, 2 if early else NUM_TAGS, (length,), generator=generator)
        tags = (tokens + torch.roll(tokens, 1)) % NUM_TAGS
        # Every third token has no target, but the first always has: no sentence is without one.
        tags[2::3] = NO_TARGET
        sentences.append((tokens, tags))
    return sentences
