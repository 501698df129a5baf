"""The models of awkward tasks: tensors of many kinds, of which each adapter must average every element."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from tasks.tagger import Tagger
from tasks.token_tagging import NUM_TAGS

_NUM_WORDS, _WORD_SIZE = 1500, 8
# Of the gradient of each row of `faint`.
_FACTORS = (1.0, 1e-3, 1e-6, 1e-9)


class VariedTagger(Tagger):
    """A tagger with parameters and buffers that adapters are known to treat otherwise than the rest.

    - `words` has more than a thousand rows. A batch uses a few of them.
    - `turned` and `patches.weight` are not contiguous, and neither are their gradients.
    - The gradient of each row of `faint` is a thousandth of that of the row before.
    - `single` has one element.
    - `table` is a buffer that is not contiguous.
    - `total` and `trend` change in each forward pass of the training, as running statistics do.
    - What an evaluation leaves behind for later forward passes, as caches of positions do, is used in the training.
    """

    def __init__(self, *, dtype: torch.dtype, dropout: float, hidden_size: int, num_layers: int) -> None:
        super().__init__(dtype=dtype, dropout=dropout, hidden_size=hidden_size, num_layers=num_layers)
        self.words = nn.Embedding(_NUM_WORDS, _WORD_SIZE)
        self.turned = nn.Parameter(torch.rand(_WORD_SIZE, NUM_TAGS).t())
        self.patches = nn.Conv2d(2, NUM_TAGS - len(_FACTORS), 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.faint = nn.Parameter(torch.rand(len(_FACTORS), _WORD_SIZE))
        self.single = nn.Parameter(torch.rand(1))
        self._factors: torch.Tensor | None = None
        self.total: torch.Tensor
        self.trend: torch.Tensor
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        self.register_buffer("trend", torch.zeros(3))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.to(dtype)

    @override
    def forward(self, tokens: torch.Tensor, is_first: torch.Tensor | None = None) -> torch.Tensor:
        """Scores every tag for every token, and notes the tokens if it is in training."""
        if self.training:
            # Padding is token 0, so both are the same however a batch is padded. A half is exact in binary.
            self.total += tokens.sum()
            self.trend.mul_(0.5).add_(tokens.sum())
        places = torch.arange(tokens.shape[1], device=tokens.device)
        words = self.words((167 * tokens + 331 * places) % _NUM_WORDS)
        patches = self.patches(words.reshape(-1, 2, 2, 2)).reshape(*tokens.shape, -1)
        if self._factors is None or not self.training:
            self._factors = words.new_tensor(_FACTORS)[:, None]
        faint = words @ (self.faint * self._factors).t()
        more = words @ self.turned.t() + torch.cat([patches, faint], dim=-1) * self.single
        scores: torch.Tensor = super().forward(tokens, is_first) + more
        return scores


class MixedTagger(Tagger):
    """A tagger with one weight in float32, whatever the dtype of the others."""

    def __init__(self, *, dtype: torch.dtype, dropout: float, hidden_size: int, num_layers: int) -> None:
        super().__init__(dtype=dtype, dropout=dropout, hidden_size=hidden_size, num_layers=num_layers)
        self.coarse = nn.Parameter(torch.rand(NUM_TAGS, NUM_TAGS, dtype=torch.float32))

    @override
    def forward(self, tokens: torch.Tensor, is_first: torch.Tensor | None = None) -> torch.Tensor:
        """Scores every tag for every token."""
        scores: torch.Tensor = super().forward(tokens, is_first)
        return scores + torch.tanh(scores) @ self.coarse.to(scores.dtype)
