"""Tokenizers: a vocabulary learned from the training texts, or a pretrained model's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.interface import TaskInputError
from tasks.text.models import VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def train_wordpiece(texts: list[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerBase:
    """Learns a WordPiece vocabulary that ignores case, as BERT's does.

    WordPiece is described in https://arxiv.org/abs/1609.08144, the parts used here in
    https://huggingface.co/docs/tokenizers/pipeline ("All together: a BERT tokenizer from scratch").

    Args:
        texts: The training texts.
        vocab_size: The largest number of entries. Every character of the texts is one, and another one if it occurs
            inside a word.
        max_length: The largest number of tokens of a text, written into the tokenizer's configuration.

    Returns:
        A tokenizer whose vocabulary is the same for the same texts, whatever the processor and number of threads.

    Raises:
        TaskInputError: The characters alone are more entries than `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special_tokens = list(_SPECIAL_TOKENS.values())

    def learn(first_entries: list[str]) -> list[str]:
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=first_entries, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        vocabulary = tokenizer.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    # The trainer numbers the characters inside words in an order that changes from call to call, and the pieces that
    # it then joins depend on these numbers. Passed as special tokens in order, they get the same numbers every time.
    # docs/findings/tokenizers_wordpiece_order.py shows it.
    inner_characters = sorted(entry for entry in learn(special_tokens) if entry.startswith("##") and len(entry) == 3)
    vocabulary = learn([*special_tokens, *inner_characters])
    _require_room(len(vocabulary), vocab_size)
    pipeline = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    entries = {entry: number for number, entry in enumerate(vocabulary)}
    # In the tokenizer itself these characters must not be special tokens, so a new one takes the vocabulary.
    tokenizer = Tokenizer(models.WordPiece(entries, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = pipeline
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **_SPECIAL_TOKENS)


def _require_room(num_entries: int, vocab_size: int) -> None:
    """Refuses a vocabulary with more entries than the embedding has rows: the trainer keeps every character."""
    if num_entries > vocab_size:
        remedy = f"choose {num_entries} or more"
        if num_entries > VOCAB_SIZE:
            remedy = "use pretrained weights (--model), which have a vocabulary of their own"
        raise TaskInputError(
            f"--vocab-size {vocab_size}: the characters of the training texts alone take {num_entries} entries; "
            f"{remedy}"
        )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Loads a pretrained model's own tokenizer.

    Args:
        directory: The model's directory.

    Returns:
        A tokenizer that can pad.

    Raises:
        TaskInputError: The files cannot be loaded, or define no padding token.
    """
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # an error message is one line, and no warning should precede it
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the parser of a damaged tokenizer may raise anything
        reason = " ".join(str(error).split())[:300]
        raise TaskInputError(
            f"--model {directory}: its tokenizer cannot be loaded ({reason}); save it again"
        ) from error
    if tokenizer.pad_token_id is None:
        raise TaskInputError(
            f"--model {directory}: its tokenizer has no padding token; set pad_token and save it again"
        )
    return tokenizer
