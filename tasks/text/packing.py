"""Samples of a batch in one row, one after the other, so that no padding is computed.

A token attends to the tokens of its own sample alone, is given its position in the sample, and the classifier is given
the first token of each sample. transformers lets its users do all three: with an attention of their own, with
`position_ids`, and with `cu_seq_lens_q`, which a model passes on to its layers: where each sample begins, and where the
last one ends (https://huggingface.co/docs/transformers/main_classes/data_collator#transformers.DataCollatorWithFlattening).

Since the classifier reads no other token, what follows attention in the last layer is computed for the first tokens
alone where samples are in one row. Nothing that anybody reads is different, and most of a layer is saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.interface import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Models whose attention can be replaced, and whose classifier reads the first token: the names of their encoder,
# and of the first module of a layer that is given what attention returned together with what the layer was given.
# In each of them, nothing but attention mixes tokens, the dropout of attention is its module `dropout`, and an encoder
# calls each dropout once. So these are left out, although their attention can be replaced: MobileBERT makes the
# embedding of a token from those of its neighbours, ALBERT calls one layer again and again, X-MOD calls a dropout twice
# and chooses adapters for a whole row, ModernBERT attends within windows, and the dropout of NomicBERT is no module.
_AFTER_ATTENTION = {
    "bert": ("encoder", "attention.output"),
    "camembert": ("encoder", "attention.output"),
    "data2vec-text": ("encoder", "attention.output"),
    "distilbert": ("transformer", "sa_layer_norm"),
    "electra": ("encoder", "attention.output"),
    "ernie": ("encoder", "attention.output"),
    "roberta": ("encoder", "attention.output"),
    "roberta-prelayernorm": ("encoder", "attention.output"),
    "xlm-roberta": ("encoder", "attention.output"),
    "xlm-roberta-xl": ("encoder", "attention.output"),
}
# These count positions from the number of the padding token on.
_COUNT_FROM_PADDING = (
    *("camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def packing_refusal(directory: Path | None) -> str | None:
    """Returns why a model cannot be given samples in one row; None if it can.

    Args:
        directory: A pretrained model's directory; None for a preset.
    """
    if directory is None:
        return None
    config = json.loads((directory / "config.json").read_bytes())
    kind = config.get("model_type")
    if kind not in _AFTER_ATTENTION:
        return f"the model is of the type {kind!r}, and samples are packed for {', '.join(_AFTER_ATTENTION)} only"
    if config.get("is_decoder"):
        return "the model is a decoder, which looks at the tokens before only"
    return None


def first_position(directory: Path | None, pad_token_id: int) -> int:
    """Returns the number that a model gives to the position of the first token of a sample.

    Args:
        directory: A pretrained model's directory; None for a preset.
        pad_token_id: The token number of padding.
    """
    if directory is None:
        return 0
    kind = json.loads((directory / "config.json").read_bytes()).get("model_type")
    return pad_token_id + 1 if kind in _COUNT_FROM_PADDING else 0


def take_rows(model: PreTrainedModel) -> None:
    """Lets a model take samples in one row, beside batches with one sample a row.

    Of samples in one row, its encoder returns the first token of each alone, [B, 1, hidden]. The masks of its dropout
    are the same in either kind of batch. Its arguments are those of transformers and, while it trains, `places`,
    `first_places` and `seed`, as in `Draws.begin`.

    Args:
        model: A model of a kind that `packing_refusal` does not refuse.
    """
    from tasks.text.attention import attend_within_samples
    from tasks.text.dropout import draw_by_sample

    attend_within_samples(model)
    encoder, after_attention = _AFTER_ATTENTION[model.config.model_type]
    last = model.base_model.get_submodule(encoder).layer[-1]
    first = _FirstTokens()
    last.register_forward_pre_hook(first.before_layer, with_kwargs=True)
    last.get_submodule(after_attention).register_forward_pre_hook(first.after_attention)
    draw_by_sample(model)


def row_options(batch: Batch, *, is_training: bool) -> dict[str, Any]:
    """Returns the arguments that a model takes after `take_rows`, beside those of `MODEL_INPUTS`.

    Their tensors can be cut along the first dimension, as those of a padded batch can.
    """
    import torch

    from tasks.text.dropout import DRAWN_FROM

    tensors, options = batch.tensors, dict[str, Any]()
    if "cu_seq_lens_q" in tensors:
        options["max_length_q"] = batch.longest
        rest = (batch.num_positions or 0) - (batch.num_tokens or 0)
        options["max_length_k"] = max(batch.longest, rest)
    if is_training:
        places = tensors["places"]
        # A fill does not wait for a GPU, a copy would.
        seed = torch.full((len(places), 1), batch.seed, device=places.device)
        options |= dict(zip(DRAWN_FROM, (places, tensors["first_places"], seed), strict=True))
    return options


class _FirstTokens:
    """Leaves the first token of each sample in a layer."""

    def __init__(self) -> None:
        self._bounds: torch.Tensor | None = None

    def before_layer(self, layer: Any, arguments: Any, options: dict[str, Any]) -> None:
        """Notes where samples begin, and where the last one ends; None where each has a row of its own."""
        self._bounds = options.get("cu_seq_lens_q")

    def after_attention(self, module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Returns of tensors [1, T, hidden] the first tokens [B, 1, hidden]; None where each has a row of its own.

        Padded batches stay whole, since a task of somebody else's, which reads other tokens, is given those.
        """
        if self._bounds is None:
            return None
        return tuple(hidden[0, self._bounds[:-1], None] for hidden in arguments)
