"""A tiny task for proofs, in float64: tag every token of synthetic sentences.

It is small enough to be compared with a reference to the last digits, and awkward on purpose: sentence lengths differ
by a factor of twelve, some tokens have no target, tags are spread unevenly over the sample numbers, the embedding is
tied to the output layer, and one weight is frozen. A mean of means, wherever one hides, changes the gradient here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from tasks.interface import Batch, Split, Task, TaskSettings, draws_nothing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

    from tasks.tagger import Tagger

    Sentence = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

NUM_TAGS = 7
# The default ignore_index of cross_entropy (https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html).
NO_TARGET = -100


class TokenTaggingSettings(TaskSettings):
    """How much synthetic data to make."""

    num_train_samples: int = Field(44, gt=0, le=1_000_000, description="synthetic training sentences")
    num_validation_samples: int = Field(23, gt=0, le=1_000_000, description="synthetic validation sentences")
    dtype: Literal["float64", "float32"] = Field("float64", description="of the parameters")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of the hidden layer")
    hidden_size: int = Field(12, gt=0, le=4096, description="width of the hidden layer")
    num_layers: int = Field(0, ge=0, le=100, description="residual layers after the hidden layer")


class TokenTagging(Task):
    """Tags tokens; its loss is a sum over tokens, not over samples."""

    name = "token-tagging"
    Settings = TokenTaggingSettings
    settings: TokenTaggingSettings
    metric_names = ("loss", "accuracy", "macro_f1")
    imported_modules: ClassVar[tuple[str, ...]] = ("tasks.tagger",)

    def prepare(self) -> None:
        """Does nothing: the sentences are drawn when they are first needed."""

    @functools.cached_property
    def _samples(self) -> dict[str, list[Sentence]]:
        return {
            "train": draw_sentences("train", self.settings.num_train_samples),
            "validation": draw_sentences("validation", self.settings.num_validation_samples),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the samples, which a worker draws again."""
        return {name: value for name, value in self.__dict__.items() if name != "_samples"}

    def num_samples(self, split: Split) -> int:
        """Counts the sentences of a split."""
        return self.settings.num_train_samples if split == "train" else self.settings.num_validation_samples

    def costs(self, split: Split) -> npt.NDArray[np.int64]:
        """Counts the tokens of each sentence."""
        import numpy as np

        return np.array([len(tokens) for tokens, _ in self._samples[split]])

    @property
    def default_learning_rate(self) -> float:
        """Large, since the task is tiny."""
        return 0.1

    def build_model(self) -> nn.Module:
        """Builds a `Tagger`, or the kind of it that a task made from this one has."""
        import torch

        settings = self.settings
        return self._kind_of_tagger()(
            dtype=getattr(torch, settings.dtype),
            dropout=settings.dropout,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_layers,
        )

    def _kind_of_tagger(self) -> type[Tagger]:
        from tasks.tagger import Tagger

        return Tagger

    @draws_nothing
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Pads `tokens` with 0 and `tags` with NO_TARGET, int64 [B, L] each, L being the longest of the B sentences."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        chosen = [self._samples[split][int(sample_id)] for sample_id in sample_ids]
        tokens = pad_sequence([torch.from_numpy(tokens) for tokens, _ in chosen], batch_first=True)
        tags = pad_sequence([torch.from_numpy(tags) for _, tags in chosen], batch_first=True, padding_value=NO_TARGET)
        return Batch({"tokens": tokens, "tags": tags}, sum(len(tokens) for tokens, _ in chosen), tokens.numel())

    def packing_refusal(self) -> None:
        """Says that the model can be given sentences in one row."""

    @draws_nothing
    def collate_packed(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Puts sentences one after the other in a row of T tokens.

        The tensors are `tokens` and `tags`, int64 [1, T], `is_first`, bool [1, T], which tells where each of the B
        sentences begins, and `sentences`, int64 [T], the number of each token's sentence in the batch.
        """
        import numpy as np
        import torch

        chosen = [self._samples[split][int(sample_id)] for sample_id in sample_ids]
        lengths = torch.tensor([len(tokens) for tokens, _ in chosen])
        sentences = torch.arange(len(chosen)).repeat_interleave(lengths)
        tensors = {
            "tokens": torch.from_numpy(np.concatenate([tokens for tokens, _ in chosen]))[None],
            "tags": torch.from_numpy(np.concatenate([tags for _, tags in chosen]))[None],
            "is_first": sentences.diff(prepend=torch.tensor([-1]))[None] > 0,
            "sentences": sentences,
        }
        return Batch(tensors, len(sentences), len(sentences))

    def num_targets(self, split: Split, sample_ids: Sequence[int]) -> int:
        """Counts the tokens that have a target."""
        return sum(int((self._samples[split][int(i)][1] != NO_TARGET).sum()) for i in sample_ids)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sums the cross-entropy over the tokens that have a target."""
        from torch import nn

        scores = self._scores(model, batch)
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch.tensors["tags"].flatten(), reduction="sum")

    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Gives for each sentence its loss, then, for each tag, how many tokens have it, are given it, and both."""
        import torch
        from torch import nn

        tags = batch.tensors["tags"]
        scores = self._scores(model, batch)
        losses = nn.functional.cross_entropy(scores.transpose(1, 2), tags, reduction="none")
        # For each tag: the targets, the predictions where there is a target, and the hits.
        is_target = (tags != NO_TARGET)[..., None]
        wanted = (tags[..., None] == torch.arange(NUM_TAGS, device=tags.device)) & is_target
        predicted = (scores.argmax(dim=-1)[..., None] == torch.arange(NUM_TAGS, device=tags.device)) & is_target
        counts = torch.cat([losses[..., None].double(), wanted, predicted, wanted & predicted], dim=2)
        if "sentences" not in batch.tensors:
            return counts.sum(dim=1)
        sentences = batch.tensors["sentences"]
        rows = counts.new_zeros(int(sentences[-1]) + 1, self.num_evaluation_columns)
        return rows.index_add(0, sentences, counts[0])

    def _scores(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        import torch

        tensors = batch.tensors
        scores: torch.Tensor
        # An argument only where there is one: models made from this task's take the tokens alone.
        scores = model(tensors["tokens"], tensors["is_first"]) if "is_first" in tensors else model(tensors["tokens"])
        # On a GPU, cross-entropy of scores in half precision rounds their logarithms to half precision under autocast.
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    @property
    def num_evaluation_columns(self) -> int:
        """One for the loss, and three for each tag."""
        return 1 + 3 * NUM_TAGS

    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Computes loss and accuracy per target, and the mean of the F1 scores of the tags that occur.

        For each tag, F1 is 2 TP / (2 TP + FP + FN), which is twice the hits over targets plus predictions; the
        macro F1 is the mean of these scores, "averaged F1" in https://arxiv.org/abs/1911.03347.
        """
        import torch

        loss, *counts = rows.sum(dim=0)
        wanted, predicted, hits = torch.stack(counts).reshape(3, NUM_TAGS)
        f1 = (2 * hits / (wanted + predicted))[wanted > 0]
        return {
            "loss": float(loss / wanted.sum()),
            "accuracy": float(hits.sum() / wanted.sum()),
            "macro_f1": float(f1.mean()),
        }

    def describe(self) -> dict[str, Any]:
        """Gives the number of sentences."""
        return {
            "num_train_samples": self.num_samples("train"),
            "num_validation_samples": self.num_samples("validation"),
        }

    def save(self, model: nn.Module, directory: Path) -> None:
        """Writes the weights as safetensors."""
        from safetensors.torch import save_model

        save_model(model, str(directory / "model.safetensors"))


def draw_sentences(split: Split, num_samples: int) -> list[Sentence]:
    """Draws sentences: the first half are long and use two of the tags, the second half are short and use all.

    Args:
        split: The split that they are for; each has its own.
        num_samples: How many sentences to draw.

    Returns:
        For each sentence its tokens and their tags, int64 [length] each; the tag of a token without a target is
        NO_TARGET.
    """
    import numpy as np

    generator = np.random.default_rng(11 if split == "train" else 12)
    drawn = []
    for index in range(num_samples):
        early = index < num_samples // 2
        length = generator.integers(8 if early else 1, 13 if early else 4)
        tokens = generator.integers(0, 2 if early else NUM_TAGS, size=length)
        tags = (tokens + np.roll(tokens, 1)) % NUM_TAGS
        # Every third token has no target. The first token always has one, so that no sentence is without a target.
        tags[2::3] = NO_TARGET
        drawn.append((tokens, tags))
    return drawn
