"""The model and the sentences of the token-tagging task; a launcher has no use for them, nor for torch."""

from __future__ import annotations

import torch
from torch import nn

from tasks.token_tagging import NO_TARGET, NUM_TAGS


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


def sentences(num_samples: int, *, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draws (tokens, tags) pairs; early sentences are long and use few tags, late ones are short."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for index in range(num_samples):
        early = index < num_samples // 2
        length = int(torch.randint(8 if early else 1, 13 if early else 4, (1,), generator=generator))
        tokens = torch.randint(0, 2 if early else NUM_TAGS, (length,), generator=generator)
        tags = (tokens + torch.roll(tokens, 1)) % NUM_TAGS
        # Every third token has no target, but the first always has: no sentence is without one.
        tags[2::3] = NO_TARGET
        drawn.append((tokens, tags))
    return drawn
