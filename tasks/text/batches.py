"""Batches of texts: padded to the longest, or one after the other in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from tasks.interface import Batch

# The tensors of a batch that are arguments of the model.
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens_q")
# More than a text has tokens: the place of a token is the number of its sample times this, and its number in it.
_PLACES_OF_A_SAMPLE = 2**20
# A row is lengthened by at most this share, so that libraries meet the same lengths again.
_LENGTHENED = 0.05
_LARGEST_MULTIPLE = 64


class Texts(NamedTuple):
    """The samples of a batch.

    Attributes:
        sample_ids: Their numbers.
        tokens: For each of them its token numbers, special ones included.
        labels: For each of them the number of its label.
    """

    sample_ids: Sequence[int]
    tokens: Sequence[npt.NDArray[np.int32]]
    labels: npt.NDArray[np.int64]


def padded_batch(texts: Texts, *, pad_token_id: int) -> Batch:
    """Pads B texts to the longest of them, of L tokens.

    Args:
        texts: The samples.
        pad_token_id: The token number of padding.

    Returns:
        A batch of `input_ids` [B, L], `attention_mask` [B, L], which is 1 for a token and 0 for padding, `labels` [B],
        `places` [B, L], which tell each token of each sample from every other, and `first_places` [B], those of the
        first tokens; all int64.
    """
    tokens = [torch.from_numpy(ids.astype(np.int64)) for ids in texts.tokens]
    lengths = torch.tensor([len(ids) for ids in tokens])
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=pad_token_id)
    longest = input_ids.shape[1]
    first_places = torch.tensor(texts.sample_ids) * _PLACES_OF_A_SAMPLE
    tensors = {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "labels": torch.from_numpy(texts.labels),
        "places": first_places[:, None] + torch.arange(longest),
        "first_places": first_places,
    }
    return Batch(tensors, int(lengths.sum()), input_ids.numel(), longest)


def packed_batch(texts: Texts, *, pad_token_id: int, first_position: int) -> Batch:
    """Puts B texts one after the other, in a row of T tokens, which is up to 5 % longer than all of them.

    Args:
        texts: The samples.
        pad_token_id: The token number of padding.
        first_position: The number that the model gives to the position of the first token of a text.

    Returns:
        A batch of `input_ids`, `position_ids` and `places` [1, T], `labels` and `first_places` [B], and `cu_seq_lens_q`
        [B + 1], which says where each text begins, and where the last one ends; all int64.
    """
    lengths = np.array([len(ids) for ids in texts.tokens])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    total = int(bounds[-1])
    length = _recurring(total)
    input_ids = np.full((1, length), pad_token_id, dtype=np.int64)
    input_ids[0, :total] = np.concatenate(texts.tokens)
    positions, places = np.zeros((2, 1, length), dtype=np.int64)
    positions[0, :total] = np.arange(total) - np.repeat(bounds[:-1], lengths)
    first_places = np.array(texts.sample_ids) * _PLACES_OF_A_SAMPLE
    places[0, :total] = np.repeat(first_places, lengths) + positions[0, :total]
    tensors = {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(positions + first_position),
        "places": torch.from_numpy(places),
        "labels": torch.from_numpy(texts.labels),
        "first_places": torch.from_numpy(first_places),
        "cu_seq_lens_q": torch.from_numpy(bounds),
    }
    return Batch(tensors, total, length, int(lengths.max()))


def _recurring(total: int) -> int:
    """Returns the next multiple of the largest power of two that lengthens a row by at most `_LENGTHENED`."""
    multiple = 1
    while 2 * multiple <= min(_LARGEST_MULTIPLE, total * _LENGTHENED):
        multiple *= 2
    return -(-total // multiple) * multiple
