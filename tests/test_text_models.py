"""Pretrained models of other types than BERT: what their configurations call things."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tasks.interface import TaskInputError
from tasks.text.models import count_positions, dropout_in_force, dropout_options, load_pretrained
from tests.test_text_classification import _minilm, _task

_SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
_SIZES |= {"intermediate_size": 64, "embedding_size": 32, "pad_token_id": 1}


def _save(directory: Path, kind: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    names = AutoConfig.for_model(kind).attribute_map
    config = AutoConfig.for_model(kind, **{names.get(name, name): size for name, size in _SIZES.items()})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)


@pytest.mark.parametrize("kind", ["distilbert", "albert", "deberta-v2", "modernbert", "mpnet", "fnet", "xlnet", "xlm"])
def test_dropout_has_another_name_in_each_type_of_model(tmp_path: Path, kind: str) -> None:
    _save(tmp_path, kind)
    model = load_pretrained(tmp_path, labels=["a", "b"], dropout=0.3)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.3}
    model.save_pretrained(tmp_path)
    assert dropout_in_force(None, tmp_path) == 0.3


@pytest.mark.parametrize(
    ("kind", "num_positions"),
    [
        ("bert", 514),
        ("ernie", 514),
        ("data2vec-text", 512),
        ("mpnet", 512),
        ("roberta", 512),
        ("roberta-prelayernorm", 512),
        ("xlm-roberta-xl", 512),
    ],
)
def test_positions_of_padding_are_none_of_a_text(tmp_path: Path, kind: str, num_positions: int) -> None:
    for padding in ("", ', "pad_token_id": 1'):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}", "max_position_embeddings": 514{padding}}}')
        assert count_positions(tmp_path) == num_positions
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert count_positions(tmp_path) == 512


def test_dropout_of_a_model_that_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(Path(_minilm()) / name)
    with pytest.raises(TaskInputError, match=r"^--dropout 0.3: models of the type 'llama' have no setting for"):
        _task(model=str(tmp_path), dropout=0.3)
    assert dropout_options(tmp_path, 0.0) == {"attention_dropout": 0.0}
