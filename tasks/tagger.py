"""The model and the sentences of the token-tagging task.

They are kept in a separate module because the launcher must not import torch.
"""

from __future__ import annotations

import torch
from torch import nn

from tasks.token_tagging import NO_TARGET, NUM_TAGS


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


def sentences(num_samples: int, *, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draws sentences: the first half are long and use two of the tags, the second half are short and use all.

    Args:
        num_samples: How many sentences to draw.
        seed: Sentences of equal seeds are equal.

    Returns:
        For each sentence its tokens and their tags, int64 [length] each; the tag of a token without a target is
        NO_TARGET.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for index in range(num_samples):
        early = index < num_samples // 2
        length = int(torch.randint(8 if early else 1, 13 if early else 4, (1,), generator=generator))
        tokens = torch.randint(0, 2 if early else NUM_TAGS, (length,), generator=generator)
        tags = (tokens + torch.roll(tokens, 1)) % NUM_TAGS
        # Every third token has no target. The first token always has one, so that no sentence is without a target.
        tags[2::3] = NO_TARGET
        drawn.append((tokens, tags))
    return drawn
