"""BatchNorm whose statistics are those of all ranks (--sync-batchnorm), with any backend and on any device.

BatchNorm normalises by the mean and the variance of the samples that a forward pass computes together (Ioffe and
Szegedy 2015, https://arxiv.org/abs/1502.03167). On a rank these are its own, so that N ranks do not compute what one
process does. Here they are those of all ranks in the same micro-step. torch.nn.SyncBatchNorm and Horovod's do the same
on GPUs and refuse the tensors of a CPU.

The layers stay what they are, with the very same parameters and buffers, so that checkpoints do not differ either.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from backends.interface import Backend


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Finds the layers that, in training, take statistics from the samples of this rank alone.

    Args:
        model: A model in training mode; layers in evaluation mode are frozen.

    Returns:
        The layers by name, without those of torch.nn.SyncBatchNorm.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    }


class Statistics(NamedTuple):
    """What BatchNorm normalises C channels by.

    Attributes:
        number: How many values each channel has, 0-d float64.
        mean: Their mean [C], float64.
        variance: Their variance [C], float64, without Bessel's correction.
    """

    number: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor


def combined(counts: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor) -> Statistics:
    """Combines what W ranks have computed, by Chan, Golub and LeVeque 1979 ("Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances"): no large sums of squares are subtracted from each other.

    Args:
        counts: How many values each channel has on a rank [W, 1]; 0 where its sample does not count.
        means: Their means [W, C].
        deviations: The sums of their squared distances from the rank's own mean [W, C].

    Returns:
        The statistics of all values together.
    """
    number = counts.sum().clamp(min=1)  # it is 0 only where ranks do not communicate, to see what is possible
    mean = (counts * means).sum(dim=0) / number
    squares = deviations + counts * (means - mean) ** 2
    return Statistics(number, mean, squares.sum(dim=0) / number)


class StatisticsOfRanks:
    """Takes the statistics of all ranks, all of which pass through the same layers in the same order.

    Attributes:
        counts: Whether the present samples of this rank count. A rank without samples computes one of another rank,
            which must neither enter the statistics nor get a gradient through them.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.counts = True
        self._layers: list[_BatchNorm] = []

    def attach(self, layers: dict[str, _BatchNorm]) -> None:
        """Has the layers normalise by the statistics of all ranks while they are in training mode.

        Raises:
            ValueError: There is no layer, or one computes something of its own; the message names it.
        """
        if not layers:
            raise ValueError("--sync-batchnorm: the model has no BatchNorm in training; leave the option out")
        for name, layer in layers.items():
            if type(layer).forward is not _BatchNorm.forward:
                raise ValueError(
                    f"--sync-batchnorm: {name} is a {type(layer).__name__}, which computes something of its own; "
                    "use torch.nn.BatchNorm1d, 2d or 3d, or leave the option out"
                )
            layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]
            self._layers.append(layer)

    def detach(self) -> None:
        """Leaves the layers as the task has made them: a task may save its model in a way that keeps all attributes."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers.clear()

    @torch.no_grad()
    def of(self, values: torch.Tensor) -> Statistics:
        """Returns the statistics of the values of all ranks.

        Args:
            values: Those of this rank [B, C, ...], in float32 or float64.
        """
        num_channels = values.shape[1]
        rows = values.new_zeros(self.backend.world_size, 1 + 2 * num_channels, dtype=torch.float64)
        if self.counts:
            found = torch.var_mean(values, dim=_all_but_channels(values), correction=0)
            variance, mean = (one.double() for one in found)
            count = values.numel() // num_channels
            rows[self.backend.rank] = torch.cat([mean.new_full((1,), count), mean, variance * count])
        rows = self.backend.all_reduce(rows)
        return combined(rows[:, :1], rows[:, 1 : 1 + num_channels], rows[:, 1 + num_channels :])


def _forward(layer: _BatchNorm, ranks: StatisticsOfRanks, inputs: torch.Tensor) -> torch.Tensor:
    """Takes the place of a layer's forward pass, which remains what it was in evaluation mode."""
    if not layer.training:
        return _BatchNorm.forward(layer, inputs)
    layer._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    values = _wide(inputs)
    statistics = ranks.of(values.detach())
    _track(layer, statistics)
    mean = statistics.mean.to(values.dtype)
    scale = (statistics.variance + layer.eps).rsqrt().to(values.dtype)
    of_ranks = (mean, scale, statistics.number, ranks)
    normalised: torch.Tensor = _Normalise.apply(inputs, layer.weight, layer.bias, *of_ranks)  # type: ignore[no-untyped-call]
    return normalised


@torch.no_grad()
def _track(layer: _BatchNorm, statistics: Statistics) -> None:
    """Updates the running statistics as torch.nn.BatchNorm does, with Bessel's correction of the variance."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked += 1
    share = layer.momentum if layer.momentum is not None else 1.0 / int(layer.num_batches_tracked)
    # Of a single value torch would raise an error on one process; here it adds no variance.
    correction = statistics.number / (statistics.number - 1).clamp(min=1)
    for running, seen in (
        (layer.running_mean, statistics.mean),
        (layer.running_var, statistics.variance * correction),
    ):
        running.mul_(1 - share).add_(seen.to(running.dtype), alpha=share)


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, and lets the gradient pass through them to the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *of_ranks: Any,
    ) -> torch.Tensor:
        mean, scale, ctx.number, ctx.ranks = of_ranks
        ctx.counts = ctx.ranks.counts
        ctx.save_for_backward(inputs, weight, mean, scale)
        result = (_wide(inputs) - _column(mean, inputs)) * _column(scale, inputs)
        if weight is not None:
            result = result * _column(weight, inputs)
        if bias is not None:
            result = result + _column(bias, inputs)
        return result.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, mean, scale = ctx.saved_tensors
        gradient = _wide(gradient)
        normalised = (_wide(inputs) - _column(mean, inputs)) * _column(scale, inputs)
        channels = _all_but_channels(inputs)
        # Of this rank: the gradients of bias and weight, which backends average over ranks as all others.
        own = torch.stack([gradient.sum(dim=channels), (gradient * normalised).sum(dim=channels)])
        of_inputs = None
        if ctx.needs_input_grad[0]:
            totals = (ctx.ranks.backend.all_reduce(own.double()) / ctx.number).to(own.dtype)
            if ctx.counts:
                gradient = gradient - _column(totals[0], inputs) - normalised * _column(totals[1], inputs)
            factor = scale if weight is None else scale * weight
            of_inputs = (gradient * _column(factor, inputs)).to(inputs.dtype)
        of_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = own[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias, None, None, None, None


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Returns values of at least single precision, in which statistics are taken under autocast, too."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _all_but_channels(values: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(values.ndim) if dimension != 1]


def _column(of_channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Shapes one number for each channel so that it meets the channel's values [B, C, ...]."""
    return of_channels.reshape(1, -1, *[1] * (values.ndim - 2))
