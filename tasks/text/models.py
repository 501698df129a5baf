"""BERT classifiers: the published sizes with fresh weights, or pretrained weights from a directory or the hub.

The sizes are those of the BERT paper (https://arxiv.org/abs/1810.04805) and of the compact models
(https://arxiv.org/abs/1908.08962). All have a vocabulary of 30522 entries, one attention head for every 64 hidden
units, and feed-forward layers four times as wide as the hidden ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.interface import TaskInputError
from tasks.text.packing import first_position

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

# The files of a pretrained model and its tokenizer. Pickled weights (*.bin) are left out: loading a pickle can run any
# code (https://docs.python.org/3/library/pickle.html).
MODEL_FILES = ["*.json", "*.txt", "model*.safetensors", "*.model"]

# What BERT and DistilBERT call the sizes of the encoder.
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layers"),
    "hidden_size": ("hidden_size", "dim"),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
}

# What types of models call the dropout of their hidden layers.
_HIDDEN_DROPOUT = ("hidden_dropout_prob", "hidden_dropout", "dropout", "mlp_dropout", "resid_pdrop")


def build_preset(
    name: str, *, labels: list[str], pad_token_id: int, dropout: float, vocab_size: int
) -> PreTrainedModel:
    """Builds a model of a published size with random weights.

    Args:
        name: A key of PRESETS.
        labels: All labels in order.
        pad_token_id: The token number of padding.
        dropout: The dropout probability of hidden layers, attention and classifier.
        vocab_size: The number of rows of the embedding; those of published models have `VOCAB_SIZE`.

    Returns:
        A BertForSequenceClassification on the CPU, in float32.
    """
    from transformers import BertConfig, BertForSequenceClassification

    num_layers, hidden_size = PRESETS[name]
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=pad_token_id,
        **_label_options(labels),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), dropout),
    )
    return BertForSequenceClassification(config)


def load_pretrained(directory: Path, *, labels: list[str], dropout: float | None) -> PreTrainedModel:
    """Loads pretrained weights below a classifier for these labels.

    The directory's own classifier is kept if it has as many labels; otherwise a new one is drawn at random. A caller
    that keeps it passes the labels in the classifier's order (see `own_labels`).

    Args:
        directory: A directory that `find_pretrained` has checked.
        labels: All labels in order.
        dropout: The dropout probability; None keeps those of config.json.

    Returns:
        A model on the CPU, in float32.

    Raises:
        TaskInputError: The directory lacks most of the model's weights, or its dropout cannot be set.
    """
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is checked below
    model: PreTrainedModel
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            directory,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,  # whatever the files have: GradScaler cannot unscale gradients in half precision
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_label_options(labels),
            **({} if dropout is None else dropout_options(directory, dropout)),
        )
    finally:
        logging.set_verbosity(before)
    # transformers only warns of weights that it does not find, and draws them at random.
    num_missing, num_tensors = len(report["missing_keys"]), len(model.state_dict())
    if 2 * num_missing > num_tensors:
        raise TaskInputError(
            f"--model {directory}: the files lack {num_missing} of the model's {num_tensors} tensors; they seem to "
            "belong to another kind of model than config.json describes"
        )
    return model


def find_pretrained(model: str) -> Path:
    """Finds a directory of pretrained weights; a hub id is downloaded into the hub's cache.

    Args:
        model: A directory or a hub id.

    Returns:
        A directory with configuration, weights and tokenizer; the weights themselves have not been read.

    Raises:
        TaskInputError: There is no such model, or its files are incomplete or damaged.
    """
    directory = Path(model)
    if not directory.exists():
        directory = _fetch(model)
    if not directory.is_dir():
        raise TaskInputError(f"--model {model}: this is a file; give the directory that holds config.json")
    for patterns, what in [
        (["config.json"], "no config.json, which describes the model"),
        (["model*.safetensors"], "no weights (model.safetensors); convert other formats with save_pretrained"),
        # tokenizer_config.json is not enough: transformers would make a tokenizer without a vocabulary from it.
        (
            ["tokenizer.json", "vocab.*", "*.model"],
            "no tokenizer (tokenizer.json); save one there with save_pretrained",
        ),
    ]:
        if not any(file for pattern in patterns for file in directory.glob(pattern)):
            raise TaskInputError(f"--model {model}: the directory has {what}")
    _check_readable(model, directory)
    return directory.resolve()


def _check_readable(model: str, directory: Path) -> None:
    """Refuses files that an interrupted download or Git LFS left incomplete, without reading the weights."""
    from safetensors import SafetensorError, safe_open

    remedy = "download the model again"
    for name in ("config.json", "tokenizer_config.json"):
        if not (directory / name).exists():
            continue
        try:
            content = json.loads((directory / name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise TaskInputError(f"--model {model}: {name} is not JSON ({error}); {remedy}") from error
        if not isinstance(content, dict):
            raise TaskInputError(f"--model {model}: {name} is not a JSON object; {remedy}")
        kind = content.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise TaskInputError(f"--model {model}: {name} has the model_type {kind!r:.50}, which is no name; {remedy}")
        _require_room(model, content)
    for file in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise TaskInputError(f"--model {model}: {file.name} cannot be read ({error}); {remedy}") from error


def _require_room(model: str, config: dict[str, object]) -> None:
    """Refuses a config.json whose model would not fit in memory in float32.

    A layer has four square matrices of attention and two of the feed-forward part.
    """
    names = (("vocab_size",), ("max_position_embeddings",), *_SIZES.values())
    vocab, positions, layers, hidden, inner = (_size(config, *spellings) or 0 for spellings in names)
    num_parameters = (vocab + positions) * hidden + layers * (4 * hidden**2 + 2 * hidden * inner)
    if 4 * num_parameters > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise TaskInputError(
            f"--model {model}: config.json describes a model of {num_parameters:.3g} parameters, which does not fit "
            "in this machine's memory; choose a smaller model"
        )


def count_positions(directory: Path) -> int:
    """Finds out how long a text may be.

    The first positions of RoBERTa's family are for padding, and the tokenizer has a say, too.

    Args:
        directory: A pretrained model's directory.

    Returns:
        The number of tokens, special ones included; MAX_POSITIONS if the files do not give it.
    """
    files = (directory / name for name in ("config.json", "tokenizer_config.json"))
    config, tokenizer = (json.loads(file.read_bytes()) if file.exists() else {} for file in files)
    positions, limit = _size(config, "max_position_embeddings"), _size(tokenizer, "model_max_length")
    if positions is not None:
        padding = _size(config, "pad_token_id")
        positions -= first_position(directory, 1 if padding is None else padding)  # 1 in all that count from it
    return min((number for number in (positions, limit) if number is not None), default=MAX_POSITIONS)


def encoder_shape(model: str, directory: Path | None) -> dict[str, int] | None:
    """Collects the sizes from which the cost of a step can be estimated.

    Args:
        model: A key of PRESETS; not used with a directory.
        directory: A pretrained model's directory, or None for a preset.

    Returns:
        `num_layers`, and `hidden_size` and `intermediate_size` in units; None if config.json has other names for them.
    """
    if directory is None:
        num_layers, hidden_size = PRESETS[model]
        return {"num_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    config = json.loads((directory / "config.json").read_bytes())
    shape = {size: value for size, names in _SIZES.items() if (value := _size(config, *names)) is not None}
    return shape if len(shape) == len(_SIZES) else None


def _size(config: dict[str, object], *names: str) -> int | None:
    """Reads a size that has one of these names."""
    return next((size for name in names if isinstance(size := config.get(name), int)), None)


def dropout_in_force(asked: float | None, directory: Path | None) -> float | None:
    """Finds the dropout probability of the hidden layers.

    Args:
        asked: The value of --dropout, if it is given.
        directory: A pretrained model's directory, or None for a preset.

    Returns:
        A probability; None if config.json does not give it.
    """
    if asked is not None or directory is None:
        return asked or 0.0
    config = json.loads((directory / "config.json").read_bytes())
    own = next((config[name] for name in _HIDDEN_DROPOUT if name in config), None)
    return float(own) if isinstance(own, (int, float)) else None


def dropout_options(directory: Path, dropout: float) -> dict[str, float]:
    """Sets every dropout probability of a pretrained model by the name that its type has for it.

    Args:
        directory: The model's directory.
        dropout: The probability.

    Returns:
        Entries of its configuration; transformers hands any others to the model, which refuses them.

    Raises:
        TaskInputError: The type of the model is not known, or it has no dropout of hidden layers, which are to have
            some.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise TaskInputError(f"--model {directory}: config.json cannot be loaded ({reason})") from error
    # That of a classifier may be None, which stands for that of hidden layers; some names end in _dropout or _prob, and
    # those of GPT in _pdrop.
    names = [
        name
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("_pdrop")) and (value is None or type(value) in (int, float))
    ]
    if dropout and not set(names) & set(_HIDDEN_DROPOUT):
        raise TaskInputError(
            f"--dropout {dropout:g}: models of the type {config.model_type!r} have no setting for the dropout of "
            "hidden layers; leave it out"
        )
    return dict.fromkeys(names, dropout)


def own_labels(directory: Path) -> list[str]:
    """Reads the labels of a pretrained model's classifier.

    Args:
        directory: The model's directory.

    Returns:
        The labels in the order of the classifier's rows; transformers' placeholders ("LABEL_0") if the model has no
        names for them, and an empty list if config.json has none at all.
    """
    names = json.loads((directory / "config.json").read_bytes()).get("id2label")
    if not isinstance(names, dict) or not all(number.isdecimal() for number in names):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


def _fetch(model: str) -> Path:
    presets = ", ".join(PRESETS)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise TaskInputError(
            f"--model {model}: there is no such directory; give a directory, a hub id or a preset ({presets})"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub client raises many unrelated kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TaskInputError(
            f"--model {model}: this is neither a preset ({presets}) nor a directory, and it cannot be downloaded "
            f"from the hub ({reason})"
        ) from error


def _label_options(labels: list[str]) -> dict[str, object]:
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
