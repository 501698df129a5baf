"""BERT classifiers: the published sizes with fresh weights, or pretrained weights from a directory or hub.

The sizes are those of the BERT paper (https://arxiv.org/abs/1810.04805) and of the compact models
(https://arxiv.org/abs/1908.08962): all with the vocabulary of 30522 entries, a head of attention
for every 64 hidden units and a feed-forward layer four times as wide as the hidden one.
"""

from __future__ import annotations

import json
import os
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

    A classifier found in the directory is kept when it has as many labels, else drawn anew; the caller
    orders labels that it already knows as it does (see `own_labels`).

    Raises:
        TaskInputError: Most of the model would be drawn anew.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    model: PreTrainedModel
    model, report = AutoModelForSequenceClassification.from_pretrained(
        directory,
        use_safetensors=True,
        local_files_only=True,
        dtype=torch.float32,  # whatever they were saved in: a loss scaler refuses gradients in half precision
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **_label_options(labels),
        **_dropout_options(dropout),
    )
    # transformers only warns and draws at random what it does not find.
    num_missing, num_tensors = len(report["missing_keys"]), len(model.state_dict())
    if 2 * num_missing > num_tensors:
        raise TaskInputError(
            f"--model {directory}: {num_missing} of {num_tensors} tensors are not among its weights; "
            "they belong to another kind of model than config.json says"
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
    for patterns, what in [
        (["config.json"], "no config.json, which says what model it is"),
        (["model*.safetensors"], "no weights (model.safetensors); convert others with save_pretrained"),
        # tokenizer_config.json is not enough: transformers would make of it a tokenizer without a vocabulary.
        (["tokenizer.json", "vocab.*", "*.model"], "no tokenizer (tokenizer.json); save it there with save_pretrained"),
    ]:
        if not any(file for pattern in patterns for file in directory.glob(pattern)):
            raise TaskInputError(f"--model {model}: the directory has {what}")
    _check_readable(model, directory)
    return directory.resolve()


def _check_readable(model: str, directory: Path) -> None:
    """Finds files that an interrupted download or a Git LFS pointer left behind, without reading the weights."""
    from safetensors import SafetensorError, safe_open

    remedy = "fetch the model again"
    for name in ("config.json", "tokenizer_config.json"):
        if not (directory / name).exists():
            continue
        try:
            content = json.loads((directory / name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise TaskInputError(f"--model {model}: {name} is not JSON ({error}); {remedy}") from error
        if not isinstance(content, dict):
            raise TaskInputError(f"--model {model}: {name} is no JSON object; {remedy}")
        _require_room(model, content)
    for file in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise TaskInputError(f"--model {model}: {file.name} cannot be read ({error}); {remedy}") from error


def _require_room(model: str, config: dict[str, object]) -> None:
    """Refuses a config.json whose model, in float32, would not fit the memory; sizes are named as in BERT's."""
    names = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size")
    sizes = [config.get(name) for name in names]
    vocab, positions, layers, hidden, inner = (size if isinstance(size, int) else 0 for size in sizes)
    num_parameters = (vocab + positions) * hidden + layers * (4 * hidden**2 + 2 * hidden * inner)
    if 4 * num_parameters > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise TaskInputError(
            f"--model {model}: config.json asks for {num_parameters:.3g} parameters, which do not fit this "
            "machine's memory; choose a smaller model"
        )


def count_positions(directory: Path) -> int:
    """Returns how many tokens a text may have for a pretrained model, MAX_POSITIONS where it does not say.

    The tokenizer is asked too: some models, RoBERTa's family for one, keep a few positions for themselves.
    """
    limits = []
    for name, entry in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        file = directory / name
        limit = json.loads(file.read_bytes()).get(entry) if file.exists() else None
        if isinstance(limit, int):
            limits.append(limit)
    return min(limits, default=MAX_POSITIONS)


def encoder_shape(model: str, directory: Path | None) -> dict[str, int] | None:
    """Returns layers and widths of a preset or of pretrained weights; None where config.json names them otherwise."""
    if directory is None:
        num_layers, hidden_size = PRESETS[model]
        return {"num_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    config = json.loads((directory / "config.json").read_bytes())
    sizes = [config.get(name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return dict(zip(("num_layers", "hidden_size", "intermediate_size"), sizes, strict=True))


def dropout_in_force(asked: float | None, directory: Path | None) -> float | None:
    """Returns the probability that hidden layers drop out with; None where config.json does not say."""
    if asked is not None or directory is None:
        return asked or 0.0
    own = json.loads((directory / "config.json").read_bytes()).get("hidden_dropout_prob")
    return float(own) if isinstance(own, (int, float)) else None


def own_labels(directory: Path) -> list[str]:
    """Returns the labels of a pretrained model's classifier in its order; transformers' placeholders if it has none."""
    names = json.loads((directory / "config.json").read_bytes()).get("id2label")
    if not isinstance(names, dict) or not all(number.isdecimal() for number in names):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


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
            f"--model {model}: neither a preset ({presets}) nor a directory, and the hub did not serve it ({reason})"
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
