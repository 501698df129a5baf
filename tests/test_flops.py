"""The count of operations, against torch's own counter, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compare.report.flops import peak_flops_per_second, training_flops_per_token
from tasks.text.models import VOCAB_SIZE, build_preset, encoder_shape


@pytest.mark.parametrize("length", [16, 128])
def test_matrix_products_are_those_that_torch_counts(length: int) -> None:
    model = build_preset("bert-mini", labels=["a", "b"], pad_token_id=0, dropout=0.0, vocab_size=VOCAB_SIZE)
    tokens = torch.randint(5, 1000, (2, length))
    shape = encoder_shape("bert-mini", None)
    assert shape is not None
    # Attention written out in matrix products, which the counter sees.
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))["logits"].sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    # Pooler and classifier, one token a sample, are all that it does not count.
    head = 6 * (256 * 256 + 256 * 2) / length
    assert training_flops_per_token(**shape, sequence_length=length) + head == pytest.approx(counted, rel=1e-3)


def test_pretrained_weights_tell_their_shape(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}')
    assert encoder_shape("mine", tmp_path) == {"num_layers": 6, "hidden_size": 384, "intermediate_size": 1536}
    config.write_text('{"n_layers": 6, "dim": 384}')
    assert encoder_shape("mine", tmp_path) is None
    config.write_text('{"n_layers": 6, "dim": 384, "hidden_dim": 1536}')  # as DistilBERT's
    assert encoder_shape("mine", tmp_path) == {"num_layers": 6, "hidden_size": 384, "intermediate_size": 1536}


def test_peaks_are_known_by_the_name_of_the_device() -> None:
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_second("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops_per_second("4 cores", "fp32") is None
