"""The model of the paced task, in a module of its own because the launcher must not import torch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from tasks.text.models import MAX_POSITIONS

# A backward pass computes twice what a forward pass does: the gradients of inputs, and those of weights
# (Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361).
_FORWARD_SHARE = 1 / 3


class Pace:
    """When a device would be done with what it was given since `begin`."""

    def __init__(self) -> None:
        self._due = time.perf_counter()

    def begin(self) -> None:
        """Begins anew, now."""
        self._due = time.perf_counter()

    def keep(self, seconds: float) -> None:
        """Waits until so many more seconds of work would be done; not at all where this process is late already."""
        self._due += seconds
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Waiting(torch.autograd.Function):
    """The identity, which takes its time in both passes."""

    @staticmethod
    @override
    def forward(ctx: Any, values: torch.Tensor, pace: Pace, seconds: float) -> torch.Tensor:
        ctx.pace, ctx.seconds = pace, seconds
        pace.keep(_FORWARD_SHARE * seconds)
        return values.view_as(values)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.pace.keep((1 - _FORWARD_SHARE) * ctx.seconds)
        return gradients[0], None, None


class _Part(nn.Module):
    """Parameters whose gradients are ready together: those of a layer, of the embeddings, or of the head.

    Args:
        shapes: The shapes of the parameters.
    """

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.stack([weight.float().mean() for weight in self.weights]).sum()


class PacedBert(nn.Module):
    """Has the parameters of BERT for classification into two classes, and takes as long as it is told to.

    Each layer takes the same time; the embeddings and the head take none. What a process has to compute for a gradient
    of the right size counts as part of the time of the layers that are still to come. What follows the last of them
    comes on top: the gradients of the embeddings, and the update.

    Args:
        num_layers: The number of layers.
        hidden_size: The width of the hidden layers; feed-forward layers are four times as wide.
        vocab_size: The number of rows of the embedding.
        seconds_per_sample: What forward and backward pass of one sample take together.
    """

    def __init__(self, *, num_layers: int, hidden_size: int, vocab_size: int, seconds_per_sample: float) -> None:
        super().__init__()
        width, inner = hidden_size, 4 * hidden_size
        norm = [(width,), (width,)]
        self.embeddings = _Part([(vocab_size, width), (MAX_POSITIONS, width), (2, width), *norm])
        attention = [(width, width), (width,)] * 4
        feed_forward = [(inner, width), (inner,), (width, inner), (width,)]
        self.layers = nn.ModuleList(_Part([*attention, *norm, *feed_forward, *norm]) for _ in range(num_layers))
        self.head = _Part([(width, width), (width,), (2, width), (2,)])
        self.seconds_of_layer = seconds_per_sample / num_layers

    @override
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Adds the means of all parameters to each input.

        Args:
            inputs: One number of each sample, [B].

        Returns:
            One number of each sample, float32 [B].
        """
        pace, seconds = Pace(), len(inputs) * self.seconds_of_layer
        values: torch.Tensor = self.embeddings(inputs)
        for layer in self.layers:
            values = _Waiting.apply(layer(values), pace, seconds)  # type: ignore[no-untyped-call]
        values = self.head(values)
        if values.requires_grad:
            values.register_hook(lambda _: pace.begin())  # type: ignore[no-untyped-call]
        return values
