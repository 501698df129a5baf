"""Attention within each sample, for batches that are padded and for samples in one row.

transformers calls it where it is registered with its `AttentionInterface`
(https://huggingface.co/docs/transformers/attention_interface). With samples in one row, `cu_seq_lens_q` says where each
of them begins, and where the last one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from tasks.text.dropout import SampleDropout

_NAME = "within-samples"
_HALVES = (torch.bfloat16, torch.float16)
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_within_samples(model: PreTrainedModel) -> None:
    """Has a model use the attention of this module."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """Makes the mask of padding where there is padding: to look for it in the mask would wait for a GPU."""
    may_skip = options["attention_mask"] is None and options.get("allow_is_bidirectional_skip", False)
    if may_skip and options.get("local_size") is None:
        # transformers makes a mask when it is compiled by torch 2.11, with which no fast kernel of a GPU is chosen.
        return None
    mask: torch.Tensor | None = sdpa_mask(*arguments, **options | {"allow_is_bidirectional_skip": may_skip})
    return mask


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention, as transformers asks for it.

    Args:
        module: The layer, whose `dropout` is that of the attention.
        query: [B, heads, L, size of a head], or with samples in one row [1, heads, T, size of a head].
        key: Likewise.
        value: Likewise.
        attention_mask: Which tokens are no padding, as `sdpa_mask` makes it; None with samples in one row.
        options: What the layer passes on: `scaling`, `dropout`, and with samples in one row `cu_seq_lens_q`,
            `max_length_q`, the length of the longest sample, and `max_length_k`, that of the longest sample or of what
            lengthens the row, whichever is longer.

    Returns:
        [B, L, heads, size of a head], or [1, T, heads, size of a head].
    """
    bounds, dtype = options.get("cu_seq_lens_q"), query.dtype
    dropout = module.dropout if options["dropout"] else None
    layer = Layer(options["scaling"], dropout, dropout.draws.tokens if dropout is not None else None)
    on_gpu = query.device.type != "cpu"
    # A CPU computes attention several times as fast in float32 as in half precision.
    with torch.autocast("cpu", enabled=False):
        if dtype in _HALVES and not on_gpu:
            query, key, value = query.float(), key.float(), value.float()
        tensors = (query, key, value)
        if bounds is None:
            attended = layer.attend(tensors, attention_mask, layer.kept(layer.keys, query)).transpose(1, 2)
        elif not on_gpu:
            attended = _one_by_one(tensors, bounds.tolist(), layer)
        elif dropout is None and dtype in _HALVES and (kernel := _kernel(query.shape[-1])) is not None:
            attended = _in_one_kernel(kernel, tensors, bounds, options["max_length_k"], layer.scale)
        else:
            attended = side_by_side(tensors, bounds, options["max_length_q"], layer)
    return attended.to(dtype).contiguous(), None


@dataclass(frozen=True)
class Layer:
    """One layer's attention.

    Attributes:
        scale: What the products of queries and keys are multiplied by.
        dropout: The dropout of the weights, if there is any.
        keys: What its masks are drawn from, for each token [B, L], or [1, T].
    """

    scale: float
    dropout: SampleDropout | None
    keys: torch.Tensor | None

    def kept(self, keys: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        """Returns what dropout multiplies the weights by, [B, heads, L, L]; None without dropout.

        Args:
            keys: What it is drawn from, for each of the tokens that attend, [B, L].
            query: [B, heads, L, size of a head].
        """
        if self.dropout is None or keys is None:
            return None
        # In half precision, what makes up for the dropped weights would be rounded.
        dtype = torch.float32 if query.dtype in _HALVES else query.dtype
        return self.dropout.attention_mask(keys, query.shape[1], dtype)

    def attend(self, tensors: _Tensors, mask: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
        """Computes attention of tensors [B, heads, L, size of a head].

        Args:
            tensors: Queries, keys and values.
            mask: Which tokens are no padding, in a shape that can be broadcast to [B, heads, L, L].
            kept: What dropout multiplies the weights by.
        """
        query, key, value = tensors
        if kept is None:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        weights = query @ key.transpose(2, 3) * self.scale
        if mask is not None:
            weights = weights.masked_fill(~mask, -torch.inf)
        weights = weights.softmax(dim=-1)  # in float32 under autocast on a GPU
        return (weights * kept.to(weights.dtype)) @ value


def _one_by_one(tensors: _Tensors, bounds: Sequence[int], layer: Layer) -> torch.Tensor:
    """Computes one sample after the other, which takes a CPU a third of the time of padding them for it."""
    length = tensors[0].shape[2]
    lengths = [end - begin for begin, end in pairwise([*bounds, length])]
    *samples, (_, _, rest) = zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    kept: Sequence[torch.Tensor | None] = [None] * len(samples)
    if layer.dropout is not None and layer.keys is not None:
        query = tensors[0]
        kept = layer.dropout.attention_masks(layer.keys, tuple(lengths[:-1]), query.shape[1], query.dtype)
    outputs = [layer.attend(sample, None, own) for sample, own in zip(samples, kept, strict=True)]
    # What lengthens the row belongs to no sample, and nothing reads it.
    return torch.cat([*outputs, rest], dim=2).transpose(1, 2)


def _in_one_kernel(
    kernel: Callable[..., torch.Tensor], tensors: _Tensors, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Has a kernel compute all samples (https://docs.pytorch.org/docs/stable/nn.attention.varlen.html).

    The kernel starts blocks of threads for `longest` tokens of every sample: on an H100, a step of BERT-base took twice
    as long with the length of the row.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    length = query.shape[0]
    # What lengthens the row is a sample of its own, so that its numbers are finite, too.
    ends = torch.nn.functional.pad(bounds, (0, 1), value=length).int()
    return kernel(query, key, value, ends, ends, longest, longest, scale=scale)[None]


def side_by_side(tensors: _Tensors, bounds: torch.Tensor, longest: int, layer: Layer) -> torch.Tensor:
    """Pads the samples of a row for attention alone, without waiting for a GPU to know their lengths.

    Args:
        tensors: Queries, keys and values [1, heads, T, size of a head].
        bounds: Where each of the B samples begins, and where the last one ends, [B + 1].
        longest: The length of the longest sample.
        layer: The layer.

    Returns:
        [1, T, heads, size of a head].
    """
    length, columns = tensors[0].shape[2], torch.arange(longest, device=bounds.device)
    places = (bounds[:-1, None] + columns).clamp(max=length - 1)
    padded = [tensor[0].transpose(0, 1)[places].transpose(1, 2) for tensor in tensors]
    mask = (columns < bounds.diff()[:, None])[:, None, None]
    kept = layer.kept(None if layer.keys is None else layer.keys[0][places], padded[0])
    attended = layer.attend((padded[0], padded[1], padded[2]), mask, kept).transpose(1, 2)
    tokens = torch.arange(length, device=bounds.device)
    samples = torch.searchsorted(bounds[1:], tokens, right=True).clamp(max=len(bounds) - 2)
    return attended[samples, (tokens - bounds[samples]).clamp(max=longest - 1)][None]


@lru_cache
def _kernel(head_size: int) -> Callable[..., Any] | None:
    """Returns torch's variable-length attention; None where it cannot be used.

    It needs the tensor cores of Ampere or later ones. Before 2.10, torch has none, and the first ones take no scale.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    fits = head_size % 8 == 0 and head_size <= 256 and torch.cuda.get_device_capability() >= (8, 0)
    return varlen_attn if fits and "scale" in signature(varlen_attn).parameters else None
