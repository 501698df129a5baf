"""Dropout whose masks depend on the sample, and not on how samples are laid out.

A library's generator draws one number after the other, so the mask of a sample depends on what was computed before it
on the same rank. Here each number is a hash of where it is used: the seed of the step, the sample, the position in it,
the layer and the column. Whatever the ranks, the micro-batches and the padding, a sample meets the same masks.
Generators of this kind are described by Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"
(https://doi.org/10.1145/2063384.2063405); the hash is the output function of SplitMix64 (Steele et al. 2014,
https://doi.org/10.1145/2660193.2660195).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Odd numbers of 64 bits: that of the golden ratio, and the two multipliers of SplitMix64, as signed integers.
_GOLDEN, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# The arguments of a model that say which samples are computed next, and in which step: those of `Draws.begin`.
DRAWN_FROM = ("places", "first_places", "seed")
# A hash has as many numbers of 16 bits, which is how finely a probability can be told.
_NUMBERS = 4
_BITS = 16


class Draws(nn.Module):
    """What the masks of a forward pass are drawn from; `begin` is called before it.

    It is a part of its model, though it computes nothing, so that a copy of the model draws masks of its own: also one
    that computes in another thread.

    Attributes:
        num_layers: How many layers draw from it.
        tokens: For each position of the batch the hash of its sample and its place in the sample, int64, in the shape
            of `input_ids`.
        samples: For each of the B samples the hash of its first token, int64 [B].
        calls: How often each layer of the classifier, by its number, has been called in this forward pass.
    """

    num_layers = 0
    tokens: torch.Tensor
    samples: torch.Tensor
    calls: dict[int, int]

    def begin(self, places: torch.Tensor, first: torch.Tensor, seed: torch.Tensor) -> None:
        """Notes which samples are computed next.

        Args:
            places: For each position of the batch, a number that only this token of this sample has, int64.
            first: Those of the first tokens of the samples, int64 [B].
            seed: The seed of the step for each row, int64 [B, 1] or [1, 1].
        """
        seed = _hashed(seed)
        self.tokens = _hashed(places * _GOLDEN + seed)
        self.samples = _hashed(first * _GOLDEN + seed.flatten())
        self.calls = {}


class SampleDropout(nn.Module):
    """Takes the place of a torch.nn.Dropout.

    Args:
        p: The probability of dropping a number.
        place: The number of the layer in its model.
        draws: What the masks are drawn from.
        counts_calls: Whether each call in a forward pass draws a mask of its own. The classifiers of RoBERTa and
            ELECTRA call one layer twice. An encoder calls each of its layers once, and once more where activations
            are checkpointed, which must draw the same mask again.
    """

    def __init__(self, p: float, place: int, draws: Draws, *, counts_calls: bool = False) -> None:
        super().__init__()
        self.p = p
        self.draws = draws
        self._place = place
        self._counts_calls = counts_calls
        # Wrapped here, since torch.compile would compute with its whole digits.
        self._start = (place * 2**32 * _GOLDEN + 2**63) % 2**64 - 2**63

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drops numbers of `hidden`: [..., width] for each token, or [B, width] or [B, 1, width] for each sample."""
        if not self.training:
            return hidden
        keys, rows = self.draws.tokens, hidden.shape[:-1]
        if keys.shape != rows:
            keys = self.draws.samples.view(rows)
        if self._counts_calls:
            calls = self.draws.calls.get(self._place, 0)
            self.draws.calls[self._place] = calls + 1
            keys = _hashed(keys + calls) if calls else keys
        return hidden * self._mask(keys, hidden.shape[-1], hidden.dtype)

    def attention_mask(self, keys: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns what the weights of an attention are multiplied by, [B, heads, L, L].

        Args:
            keys: The hashes of the tokens that attend, int64 [B, L].
            num_heads: Of the attention.
            dtype: Of its weights.
        """
        return self._mask(_of_heads(keys, num_heads), keys.shape[1], dtype)

    def attention_masks(
        self, keys: torch.Tensor, lengths: tuple[int, ...], num_heads: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Returns the masks of samples in one row, each as `attention_mask` does for it alone, in a third of the time.

        Args:
            keys: The hashes of the tokens that attend, int64 [1, T].
            lengths: The lengths L of the samples, which may leave the last tokens of the row out.
            num_heads: As in `attention_mask`.
            dtype: Likewise.

        Returns:
            For each sample [1, heads, L, L].
        """
        tokens, columns = _places_in_row(lengths)
        keys = _of_heads(keys, num_heads)[..., tokens.to(keys.device)]
        numbers = self._numbers(keys, columns.to(keys.device))
        widths = [-(-length // _NUMBERS) * _NUMBERS for length in lengths]
        blocks = [length * width for length, width in zip(lengths, widths, strict=True)]
        masks = torch.split(self._drawn(numbers, dtype), blocks, dim=-1)
        return [
            mask.view(1, num_heads, length, width)[..., :length]
            for mask, length, width in zip(masks, lengths, widths, strict=True)
        ]

    def _mask(self, keys: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns what numbers are multiplied by, [..., width], with a hash for each row, int64 [...]."""
        columns = torch.arange(-(-width // _NUMBERS), device=keys.device)
        return self._drawn(self._numbers(keys[..., None], columns)[..., :width], dtype)

    def _numbers(self, keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Draws `_NUMBERS` integers of 16 bits for each key and column, in the last dimension."""
        return _hashed(keys + columns * _GOLDEN + self._start).view(torch.int16)

    def _drawn(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns 0, or what makes up for those that are dropped."""
        threshold = round(self.p * 2**_BITS) - 2 ** (_BITS - 1)
        # Booleans would first be written, and then be converted in seven times the time.
        mask = torch.ge(numbers, threshold, out=torch.empty(numbers.shape, dtype=dtype, device=numbers.device))
        return mask.div_(1 - self.p)


def draw_by_sample(model: PreTrainedModel) -> None:
    """Replaces every dropout of a model, which is then given what their masks are drawn from: `DRAWN_FROM`."""
    draws, encoder = Draws(), set(model.base_model.modules())
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout) and module.p:
            parent, _, attribute = name.rpartition(".")
            own = SampleDropout(module.p, draws.num_layers, draws, counts_calls=module not in encoder)
            setattr(model.get_submodule(parent), attribute, own)
            draws.num_layers += 1
    model.draws = draws
    model.register_forward_pre_hook(_begin_draws, with_kwargs=True)


def _begin_draws(
    model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes the arguments of `Draws.begin` from those of the model: a pre-hook of it."""
    own = {name: value for name, value in options.items() if name not in DRAWN_FROM}
    draws = model.draws
    if model.training and isinstance(draws, Draws) and draws.num_layers:
        draws.begin(*(options[name] for name in DRAWN_FROM))
    return arguments, own


def _of_heads(keys: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a hash for each head and token, [B, L] to [B, heads, L]."""
    return _hashed(keys[:, None] + torch.arange(num_heads, device=keys.device)[:, None] * _GOLDEN)


@lru_cache(maxsize=1)
def _places_in_row(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for each hash that the attentions of samples in one row need its token and its column: int64 [N]."""
    of_tokens = np.repeat([-(-length // _NUMBERS) for length in lengths], lengths)
    tokens = np.repeat(np.arange(len(of_tokens)), of_tokens)
    columns = np.arange(len(tokens)) - (np.cumsum(of_tokens) - of_tokens)[tokens]
    return torch.from_numpy(tokens), torch.from_numpy(columns)


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of each number, int64 to int64; the product of two wraps around."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts to the right, with zeros from the left also where a number is negative."""
    shifted: torch.Tensor = (numbers >> bits) & (2 ** (64 - bits) - 1)
    return shifted
