"""BERT classifiers: the published sizes with fresh weights, or pretrained weights from a directory or hub.

The sizes are those of the BERT paper (https://arxiv.org/abs/1810.04805) and of the compact models
(https://arxiv.org/abs/1908.08962): all with the vocabulary of 30522 entries, a head of attention
for every 64 hidden units and a feed-forward layer four times as wide as the hidden one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.interface import TaskInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 30522
MAX_POSITIONS = 512

# name -> (layers, hidden size)
PRESETS = {
    "bert-tiny": (2, 128),
    "bert-mini": (4, 256),
    "bert-small": (4, 512),
    "bert-base": (12, 768),
    "bert-large": (24, 1024),
}

# What a pretrained model and its tokenizer consist of. Weights in pickles (*.bin) are left out:
# loading one can execute anything.
MODEL_FILES = ["*.json", "*.txt", "model*.safetensors", "*.model"]


def build_preset(name: str, *, labels: list[str], pad_token_id: int, dropout: float) -> PreTrainedModel:
    """Builds a preset with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    num_layers, hidden_size = PRESETS[name]
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=pad_token_id,
        **_label_options(labels),
        **_dropout_options(dropout),
    )
    return BertForSequenceClassification(config)


def load_pretrained(directory: Path, *, labels: list[str], dropout: float | None) -> PreTrainedModel:
    """Loads pretrained weights and puts a classifier over these labels on top.

    A classifier found in the directory is kept when it has as many labels, else drawn anew.
    """
    from transformers import AutoModelForSequenceClassification

    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        directory,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        **_label_options(labels),
        **_dropout_options(dropout),
    )
    return model


def find_pretrained(model: str) -> Path:
    """Finds the directory of pretrained weights that `model` names, fetching a hub id into the hub's cache.

    Raises:
        TaskInputError: It names neither a preset, nor a complete directory, nor a model of the hub.
    """
    directory = Path(model)
    if not directory.exists():
        directory = _fetch(model)
    if not directory.is_dir():
        raise TaskInputError(f"--model {model}: this is a file; give the directory that holds config.json")
    for pattern, what in [
        ("config.json", "no config.json, which says what model it is"),
        ("model*.safetensors", "no weights (model.safetensors); convert others with save_pretrained"),
        ("tokenizer*.json", "no tokenizer (tokenizer.json); save it there with save_pretrained"),
    ]:
        if not any(directory.glob(pattern)):
            raise TaskInputError(f"--model {model}: the directory has {what}")
    return directory.resolve()


def _fetch(model: str) -> Path:
    presets = ", ".join(PRESETS)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise TaskInputError(f"--model {model}: there is no such directory; give one, a hub id or a preset ({presets})")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub client raises many unrelated kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TaskInputError(
            f"--model {model}: neither a preset ({presets}) nor a directory, "
            f"and the hub did not serve it ({reason})"
        ) from error


def _label_options(labels: list[str]) -> dict[str, object]:
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def _dropout_options(dropout: float | None) -> dict[str, float]:
    if dropout is None:
        return {}
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "classifier_dropout": dropout}
