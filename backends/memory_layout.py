"""The memory layout of parameters, for libraries that can send contiguous tensors only."""

from __future__ import annotations

import torch
from torch import nn


def make_contiguous(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter the usual memory layout, and with it every gradient, which autograd lays out alike.

    Values stay as they are. A weight in channels_last loses the speed that this layout may give.

    Args:
        model: Its transposed parameters, and those in channels_last, are copied.
        optimizer: Its state of such parameters is copied, too, since fused kernels read both in the order of memory.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    for owner, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == owner.shape:
                state[name] = value.contiguous()
