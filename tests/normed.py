"""A task whose buffers change in training, for the tests of ranks that differ in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.token_tagging import TokenTagging, TokenTaggingSettings

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from tasks.interface import Batch


class NormedSettings(TokenTaggingSettings):
    frozen: bool = Field(False, description="whether the running statistics stay as they are")


class NormedTask(TokenTagging):
    """With BatchNorm, and with buffers of whole numbers and truth values that no state_dict has."""

    Settings = NormedSettings
    settings: NormedSettings
    has_batch_norm = True

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        class Normed(nn.Module):
            def __init__(self, tagger: nn.Module, size: int, frozen: bool) -> None:
                super().__init__()
                self.tagger, self.frozen = tagger, frozen
                self.norm = nn.BatchNorm1d(7, dtype=torch.float64)
                self.register_buffer("num_ones", torch.zeros((), dtype=torch.int64), persistent=False)
                self.register_buffer("is_odd", torch.zeros(3, dtype=torch.bool), persistent=False)

            def train(self, mode: bool = True) -> Any:
                super().train(mode)
                self.norm.train(mode and not self.frozen)
                return self

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                if self.training and not self.frozen:
                    self.num_ones += (tokens == 1).sum()
                    self.is_odd[:] = self.num_ones % 2 == 1
                scores: torch.Tensor = self.norm(self.tagger(tokens).flatten(0, 1))
                # What whole numbers and truth values do to the result must not depend on the rank.
                return scores.unflatten(0, tokens.shape) * (1 + 1e-3 * self.is_odd.sum() + 1e-6 * self.num_ones)

        return Normed(super().build_model(), 7, self.settings.frozen)


class PickledTask(TokenTagging):
    """With BatchNorm, in a model that is saved with all attributes of its modules."""

    has_batch_norm = True
    model_files = ("model.pickle",)

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        return nn.Sequential(super().build_model(), nn.Flatten(0, 1), nn.BatchNorm1d(7, dtype=torch.float64))

    def _scores(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super()._scores(model, batch).unflatten(0, batch.tensors["tokens"].shape)

    def save(self, model: nn.Module, directory: Path) -> None:
        import torch

        torch.save(model, directory / "model.pickle")


class GrowingTask(TokenTagging):
    """With a cache that grows by what a rank has seen, and a buffer that the first forward pass removes."""

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        class Growing(nn.Module):
            def __init__(self, tagger: nn.Module) -> None:
                super().__init__()
                self.tagger = tagger
                self.register_buffer("cache", torch.zeros(1), persistent=False)
                self.register_buffer("unused", torch.zeros(1), persistent=False)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                self.cache = torch.arange(len(self.cache) + tokens.numel())
                self.unused = None
                scores: torch.Tensor = self.tagger(tokens)
                return scores

        return Growing(super().build_model())
