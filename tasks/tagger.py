"""The model of the token-tagging task, in a module of its own because the launcher must not import torch."""

from __future__ import annotations

import torch
from torch import nn

from tasks.token_tagging import NUM_TAGS


class Tagger(nn.Module):
    """Embeds tokens, mixes each with its left neighbour, and scores tags with the embedding's own weights.

    The tied weight follows Press and Wolf, "Using the Output Embedding to Improve Language Models"
    (https://arxiv.org/abs/1608.05859): its gradient comes from two places in the graph.

    Args:
        dtype: The dtype of parameters and buffers.
        dropout: The probability with which a hidden unit is dropped.
        hidden_size: The width of embedding and hidden layer.
        num_layers: The number of residual layers after the hidden one.
    """

    def __init__(self, *, dtype: torch.dtype, dropout: float, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TAGS, hidden_size)
        self.mixer = nn.Linear(2 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, NUM_TAGS)
        self.output.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.gain = nn.Parameter(0.5 + torch.rand(hidden_size), requires_grad=False)
        # Random buffers start out different on each rank; the second one is not part of the state_dict.
        self.register_buffer("marks", torch.randint(0, 1000, (3,)))
        self.register_buffer("hidden_marks", torch.rand(3), persistent=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, is_first: torch.Tensor | None = None) -> torch.Tensor:
        """Scores every tag for every token.

        Args:
            tokens: Token numbers, int64 [batch, length].
            is_first: Which tokens begin a sentence, bool [batch, length]; None for those of the first column.

        Returns:
            Scores [batch, length, NUM_TAGS] in the model's dtype.
        """
        embedded = self.embedding(tokens)
        left = nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        if is_first is not None:
            left = left.masked_fill(is_first[..., None], 0)
        hidden = self.dropout(torch.tanh(self.mixer(torch.cat([embedded, left], dim=-1))))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        scores: torch.Tensor = self.output(hidden * self.gain)
        return scores
