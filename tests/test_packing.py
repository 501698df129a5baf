"""Samples in one row: the same sums and gradients as with padding, under every model that takes them."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen
from transformers.masking_utils import bidirectional_mask_function

from tasks.interface import Batch
from tasks.text import attention
from tasks.text.attention import Layer, side_by_side
from tasks.text.batches import MODEL_INPUTS, Texts, packed_batch, padded_batch
from tasks.text.dropout import Draws, SampleDropout
from tasks.text.packing import _AFTER_ATTENTION, row_options, take_rows

_SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 1, "num_labels": 3}
KINDS = tuple(_AFTER_ATTENTION)
_COUNT_FROM_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
FIRST_POSITIONS = dict.fromkeys(_COUNT_FROM_PADDING, 2)


def _stock_model(kind: str, *, dropout: float) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes: dict[str, Any] = dict(_SIZES)
    if kind == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    if kind == "ernie":
        sizes["use_task_id"] = True  # ERNIE 2.0 and 3.0 embed the number of a task, too
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    drops = (*drops, "dropout", "attention_dropout", "seq_classif_dropout")
    config = AutoConfig.for_model(kind, **sizes, **dict.fromkeys(drops, dropout))
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).double().train()


def _model(kind: str, *, dropout: float) -> Any:
    model = _stock_model(kind, dropout=dropout)
    take_rows(model)
    return model


def _samples(lengths: list[int]) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    random = np.random.default_rng(3)
    return [random.integers(2, 50, length).astype(np.int32) for length in lengths]


LENGTHS = [7, 1, 30, 12, 12, 3]


def _batches(kind: str) -> list[Batch]:
    """The same samples in both kinds of batches."""
    texts = Texts(range(5, 5 + len(LENGTHS)), _samples(LENGTHS), np.arange(len(LENGTHS)) % 3)
    packed = packed_batch(texts, pad_token_id=1, first_position=FIRST_POSITIONS.get(kind, 0))
    return [replace(batch, seed=5) for batch in (padded_batch(texts, pad_token_id=1), packed)]


def _gradients(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    inputs = {name: batch.tensors[name] for name in MODEL_INPUTS if name in batch.tensors}
    logits = model(**inputs, **row_options(batch, is_training=True))["logits"]
    torch.nn.functional.cross_entropy(logits, batch.tensors["labels"], reduction="sum").backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_computes_what_padded_batches_compute(kind: str, dropout: float) -> None:
    # A copy of a model draws masks of its own.
    model = copy.deepcopy(_model(kind, dropout=dropout))
    padded, packed = (_gradients(model, batch) for batch in _batches(kind))
    assert padded.keys() == packed.keys()
    largest = max(float(gradient.abs().max()) for gradient in padded.values())
    for name, gradient in padded.items():
        assert float((gradient - packed[name]).abs().max()) <= 1e-12 * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_model_of_transformers_computes(kind: str) -> None:
    """Also where the last layer is computed for the first tokens alone."""
    padded, packed = _batches(kind)
    inputs = {name: padded.tensors[name] for name in MODEL_INPUTS if name in padded.tensors}
    stock = _stock_model(kind, dropout=0.0)
    expected = stock(**inputs)["logits"]
    model = _model(kind, dropout=0.0)
    for batch in (padded, packed):
        inputs = {name: batch.tensors[name] for name in MODEL_INPUTS if name in batch.tensors}
        logits = model(**inputs, **row_options(batch, is_training=True))["logits"]
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_activations_meet_the_same_masks(kind: str) -> None:
    """A layer that is computed again in the backward pass draws what it drew before."""
    model = _model(kind, dropout=0.3)
    for batch in _batches(kind):
        expected = _gradients(model, batch)
        model.gradient_checkpointing_enable()
        again = _gradients(model, batch)
        model.gradient_checkpointing_disable()
        for name, gradient in expected.items():
            torch.testing.assert_close(again[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_stay_whole_for_whoever_reads_other_tokens(kind: str) -> None:
    padded, packed = _batches(kind)
    seen: list[torch.Size] = []
    model = _model(kind, dropout=0.0)
    encoder = model.base_model.get_submodule("transformer" if kind == "distilbert" else "encoder")
    encoder.register_forward_hook(lambda _, __, output: seen.append(output["last_hidden_state"].shape[:2]))
    for batch in (padded, packed):
        _gradients(model, batch)
    assert seen == [padded.tensors["input_ids"].shape, torch.Size([len(LENGTHS), 1])]


def test_masks_of_samples_in_one_row_are_those_of_each_alone() -> None:
    draws, lengths = Draws(), (7, 1, 30, 4)
    draws.begin(torch.arange(45)[None], torch.tensor([0, 7, 8, 38]), torch.tensor(3))
    dropout = SampleDropout(0.3, 2, draws).train()
    begin = 0
    for length, mask in zip(lengths, dropout.attention_masks(draws.tokens, lengths, 3, torch.float32), strict=True):
        alone = dropout.attention_mask(draws.tokens[:, begin : begin + length], 3, torch.float32)
        assert torch.equal(mask, alone)
        begin += length


@pytest.mark.parametrize("with_dropout", [False, True])
def test_padding_for_attention_alone_computes_what_one_sample_after_the_other_does(*, with_dropout: bool) -> None:
    """Such is attention on a GPU, where no kernel does it; it also runs on a CPU."""
    torch.manual_seed(0)
    bounds, length, longest = torch.tensor([0, 7, 8, 30, 41]), 44, 22
    tensors = [torch.randn(1, 3, length, 5, dtype=torch.float64) for _ in range(3)]
    draws = Draws()
    draws.begin(torch.arange(length)[None], bounds[:-1], torch.tensor(1))
    layer = Layer(0.4, SampleDropout(0.3, 0, draws) if with_dropout else None, draws.tokens if with_dropout else None)
    padded = side_by_side((tensors[0], tensors[1], tensors[2]), bounds, longest, layer)
    for begin, end in pairwise(bounds.tolist()):
        keys = draws.tokens[:, begin:end] if with_dropout else None
        query, key, value = (tensor[:, :, begin:end] for tensor in tensors)
        alone = layer.attend((query, key, value), None, layer.kept(keys, query)).transpose(1, 2)
        torch.testing.assert_close(padded[:, begin:end], alone, rtol=1e-12, atol=1e-12)
    assert bool(padded.isfinite().all())


def test_the_kernel_of_a_gpu_is_used_where_it_exists_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention._kernel.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert kernel(64) is varlen.varlen_attn
    assert kernel(12) is kernel(264) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        assert kernel(64) is None
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: query)  # as in the first torch that has one
    assert kernel(64) is None
    monkeypatch.setitem(sys.modules, varlen.__name__, None)
    assert kernel(64) is None


def test_a_compiled_model_makes_a_mask_only_where_something_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 says of a model that it compiles that it exports it, and transformers makes a mask for any export."""
    monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", lambda: True)
    make = partial(attention._mask, 2, 3, 3, mask_function=bidirectional_mask_function)
    padding = torch.tensor([[True, True, False]] * 2)
    assert make(attention_mask=None, allow_is_bidirectional_skip=True) is None
    assert make(attention_mask=padding, allow_is_bidirectional_skip=True) is not None
    assert make(attention_mask=None, allow_is_bidirectional_skip=False) is not None  # such a model masks more


def test_a_row_is_lengthened_by_five_per_cent_at_most() -> None:
    for total in (1, 19, 40, 100, 433, 5000):
        texts = Texts(range(total), _samples([1] * total), np.zeros(total, dtype=np.int64))
        row = packed_batch(texts, pad_token_id=1, first_position=0)
        assert total == row.num_tokens <= row.num_positions <= 1.05 * total
        assert int(row.tensors["cu_seq_lens_q"][-1]) == total


def test_a_layer_that_is_called_twice_draws_two_masks() -> None:
    """As the classifiers of RoBERTa and ELECTRA do."""
    draws, ones = Draws(), torch.ones(1, 40, 100)
    dropout = SampleDropout(0.5, 0, draws, counts_calls=True).train()
    passes = []
    for _ in range(2):
        draws.begin(torch.arange(40)[None], torch.tensor([0]), torch.tensor(1))
        passes.append((dropout(ones), dropout(ones)))
    assert float((passes[0][0] == passes[0][1]).double().mean()) == pytest.approx(0.5, abs=0.05)
    assert all(torch.equal(first, again) for first, again in zip(*passes, strict=True))


def test_masks_drop_as_often_as_they_should_and_differ() -> None:
    draws = Draws()
    dropout = SampleDropout(0.1, 3, draws).train()
    masks = []
    for seed in (1, 2):
        draws.begin(torch.arange(2000)[None], torch.tensor([0]), torch.tensor(seed))
        masks.append(dropout(torch.ones(1, 2000, 130)))
    for mask in masks:
        assert float((mask == 0).double().mean()) == pytest.approx(0.1, abs=0.002)
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
        columns, rows = (mask == 0).double().mean(dim=1), (mask == 0).double().mean(dim=2)
        assert float(columns.std()) == pytest.approx((0.09 / 2000) ** 0.5, rel=0.3)
        assert float(rows.std()) == pytest.approx((0.09 / 130) ** 0.5, rel=0.3)
    assert float((masks[0] == masks[1]).double().mean()) == pytest.approx(0.82, abs=0.01)
