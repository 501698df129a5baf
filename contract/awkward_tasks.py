"""Tasks that are awkward on purpose: faulty, with parameters that are not used, or with tensors of many kinds."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from launch.starters.environment import rank_of_process
from tasks.interface import Batch, Split
from tasks.token_tagging import NUM_TAGS, TokenTagging, TokenTaggingSettings

if TYPE_CHECKING:
    import torch

    from tasks.tagger import Tagger

_FAULTY_BATCH = 5


class FaultySettings(TokenTaggingSettings):
    """Which rank fails, and how."""

    fault: Literal["raises", "exits", "is-killed", "hangs"] = Field("raises", description="what a rank does")
    faulty_rank: int = Field(1, description="the rank that does it, in its fifth batch")


class FaultyTask(TokenTagging):
    """One rank fails in its fifth batch of the training, after it has printed the time."""

    Settings: ClassVar[type[TokenTaggingSettings]] = FaultySettings
    settings: FaultySettings
    _num_batches = 0

    @override
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._num_batches += split == "train"
        if self._num_batches == _FAULTY_BATCH and rank_of_process() == self.settings.faulty_rank:
            print(f"fault at {time.time()}", flush=True)
            self._fail()
        return super().collate(split, sample_ids)

    def _fail(self) -> None:
        if self.settings.fault == "raises":
            raise ArithmeticError("the planted error")
        if self.settings.fault == "exits":
            sys.exit(3)
        if self.settings.fault == "is-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class UnusedParameterTask(TokenTagging):
    """Has a parameter that no forward pass uses."""

    @override
    def build_model(self) -> torch.nn.Module:
        import torch

        model = super().build_model()
        dtype = getattr(torch, self.settings.dtype)
        model.register_parameter("idle", torch.nn.Parameter(torch.ones(3, 3, dtype=dtype)))
        return model


class DisusedParameterTask(UnusedParameterTask):
    """Uses that parameter in the first forward pass of the training, and never again."""

    @override
    def build_model(self) -> torch.nn.Module:
        import torch

        model = super().build_model()
        model.register_buffer("is_used", torch.ones((), dtype=torch.bool))
        model.register_forward_hook(_use_idle_once)
        return model


def _use_idle_once(model: Any, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    if model.training and model.is_used:
        model.is_used.fill_(False)
        scores = scores * (1 + model.idle.mean())
    return scores


class RareParameterTask(UnusedParameterTask):
    """Uses that parameter for few sentences, so that it gets a gradient in some micro-batches on some ranks only."""

    @override
    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_forward_hook(_use_idle)
        return model


def _use_idle(model: Any, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    is_rare = arguments[0][:, 0] == NUM_TAGS - 1
    return scores * (1 + is_rare[:, None, None] * model.idle.mean()) if is_rare.any() else scores


class VariedTask(TokenTagging):
    """Has parameters and buffers of many kinds: see `VariedTagger`."""

    imported_modules = ("tasks.tagger", "contract.awkward_models")

    @override
    def _kind_of_tagger(self) -> type[Tagger]:
        from contract.awkward_models import VariedTagger

        return VariedTagger


class MixedTask(TokenTagging):
    """Has parameters of two dtypes."""

    imported_modules = ("tasks.tagger", "contract.awkward_models")

    @override
    def _kind_of_tagger(self) -> type[Tagger]:
        from contract.awkward_models import MixedTagger

        return MixedTagger


class NormedTask(TokenTagging):
    """Has BatchNorm over the first tokens of the sentences, two values of each, so that padding has no part in it."""

    has_batch_norm = True

    @override
    def build_model(self) -> torch.nn.Module:
        import torch

        model = super().build_model()
        model.add_module(
            "norm", torch.nn.BatchNorm1d(self.settings.hidden_size // 2, dtype=getattr(torch, self.settings.dtype))
        )
        model.register_forward_hook(_use_norm)
        return model


def _use_norm(model: Any, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    first = model.embedding(arguments[0][:, 0]).unflatten(1, (-1, 2))
    factor: torch.Tensor = 1 + model.norm(first).tanh().mean(dim=(1, 2))
    return scores * factor[:, None, None]
