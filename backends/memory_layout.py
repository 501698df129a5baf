"""The memory layout of parameters, for libraries that can send contiguous tensors only."""

from __future__ import annotations

from torch import nn


def make_contiguous(model: nn.Module) -> None:
    """Gives every parameter the usual memory layout, and with it every gradient, which autograd lays out alike.

    Values stay as they are. A weight in channels_last loses the speed that this layout may give.

    Args:
        model: Its transposed parameters, and those in channels_last, are copied.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
