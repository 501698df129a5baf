"""Tokenised texts on disk: built once by one process, then memory-mapped by every rank.

A prepared data set is a directory of the cache whose name is a hash of everything it depends on.
It appears there by one rename, complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from tasks.interface import Split, TaskInputError
from tasks.text.facts import text_facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

_FORMAT = 6
_SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True)
class PreparedText:
    """A prepared data set's directory and the facts written beside it.

    Attributes:
        directory: Holds train.arrow, validation.arrow (input_ids, label) and tokenizer/.
        labels: Label names; a sample's label is an index into it.
        pad_token_id: What to pad input_ids with.
        num_samples: Samples of each split.
        label_counts: Samples of each label, for each split.
        num_tokens: Tokens of each split, special ones included.
        lengths: Tokens of a text before it was cut, for each split: the median as `p50`, `p95`, `max`, and how many
            texts were `cut`.
        texts: What `text_facts` counts.
        digest: Start of a SHA-256 of all texts and labels.
    """

    directory: Path
    labels: list[str]
    pad_token_id: int
    num_samples: dict[str, int]
    label_counts: dict[str, list[int]]
    num_tokens: dict[str, int]
    lengths: dict[str, dict[str, int]]
    texts: dict[str, Any]
    digest: str

    def open(self, split: Split) -> TokenTable:
        return TokenTable(self.directory / f"{split}.arrow")


class TokenTable:
    """One split's samples, memory-mapped: ranks of one machine share the pages."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        tokens = table["input_ids"].chunk(0)
        self._tokens = tokens.values.to_numpy()
        self._offsets = tokens.offsets.to_numpy()
        self._labels = table["label"].chunk(0).to_numpy()

        self._path = path

    def __reduce__(self) -> tuple[type[TokenTable], tuple[Path]]:
        """Goes to another process as a path: the pages are shared, not copied."""
        return TokenTable, (self._path,)

    def tokens(self, sample_id: int) -> npt.NDArray[np.int32]:
        """Returns a sample's token numbers, special ones included."""
        tokens: npt.NDArray[np.int32] = self._tokens[self._offsets[sample_id] : self._offsets[sample_id + 1]]
        return tokens

    def labels(self, sample_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Returns the label numbers of some samples."""
        labels: npt.NDArray[np.int64] = self._labels[sample_ids]
        return labels


def cache_directory() -> Path:
    """Returns LOCKSTEP_CACHE, else lockstep/ in XDG_CACHE_HOME or ~/.cache; what is empty counts as not set.

    Raises:
        TaskInputError: The user has no home directory.
    """
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()  # noqa: PTH111 (~ may be nobody's)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The XDG specification ignores a relative path.
        return (shared if shared.is_absolute() else Path.home() / ".cache").absolute() / "lockstep"
    except RuntimeError as error:
        raise TaskInputError(f"no home directory to keep tokenised texts in ({error}); set LOCKSTEP_CACHE") from error


def fingerprint(path: Path) -> list[list[Any]]:
    """Identifies the present content of a file or of all files of a directory by size and time of change."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def find_or_prepare(key: dict[str, Any], build: Callable[[Path], None]) -> PreparedText:
    """Opens the prepared data set of `key`; where there is none, one process makes it while others wait.

    Args:
        key: Everything the result depends on, as JSON values.
        build: Fills an empty directory, as `write_prepared` does.

    Raises:
        TaskInputError: The cache cannot be written, or `build` refused its input.
    """
    from filelock import FileLock

    digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()[:24]
    parent = cache_directory() / "text"
    target = parent / digest
    if not target.exists():
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(parent / f"{digest}.lock")
            lock.acquire()
        except OSError as error:
            raise TaskInputError(f"{parent}: cannot be written ({error.strerror}); set LOCKSTEP_CACHE") from error
        try:
            if not target.exists():
                unfinished = Path(mkdtemp(prefix=f"{digest}.", dir=parent))
                try:
                    build(unfinished)
                    unfinished.rename(target)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
        finally:
            lock.release()
    return PreparedText(directory=target, **json.loads((target / "facts.json").read_text()))


def write_prepared(
    directory: Path,
    tables: dict[Split, pa.Table],
    labels: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
) -> None:
    """Tokenises both splits into `directory`, cutting texts to `max_seq_length` tokens."""
    import datasets
    import numpy as np
    import pyarrow as pa

    datasets.disable_progress_bars()
    index = {label: number for number, label in enumerate(labels)}

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(rows["text"], truncation=True, max_length=max_seq_length)["input_ids"]
        # Only a text that fills its room can have been cut.
        full = [number for number, tokens in enumerate(ids) if len(tokens) == max_seq_length]
        lengths = [len(tokens) for tokens in ids]
        if full:
            whole = tokenizer([rows["text"][number] for number in full], verbose=False)["input_ids"]
            for number, tokens in zip(full, whole, strict=True):
                lengths[number] = len(tokens)
        return {"input_ids": ids, "label": [index[label] for label in rows["label"]], "length": lengths}

    columns = datasets.Features({"input_ids": datasets.List(datasets.Value("int32")), "label": datasets.Value("int64")})
    columns["length"] = datasets.Value("int64")
    facts: dict[str, Any] = {"labels": labels, "pad_token_id": tokenizer.pad_token_id}
    facts |= {"num_samples": {}, "label_counts": {}, "num_tokens": {}, "lengths": {}}
    facts["texts"] = text_facts(tables, labels)
    digest = hashlib.sha256()
    for split, table in tables.items():
        # In pieces of one size, whatever those in which it was read.
        for batch in table.select(["text", "label"]).combine_chunks().to_batches(max_chunksize=1000):
            digest.update(json.dumps(batch.to_pydict()).encode())
        rows = datasets.Dataset(table)
        cache_file = directory / f"{split}.map"
        encoded = rows.map(
            encode,
            batched=True,
            remove_columns=rows.column_names,
            features=columns,
            cache_file_name=str(cache_file),
        )
        # In one piece, so that a sample is found by its offset alone.
        tokenised = encoded.data.table.combine_chunks()
        facts["lengths"][split] = _describe_lengths(tokenised["length"], max_seq_length)
        tokenised = tokenised.drop_columns(["length"])
        with pa.ipc.new_file(str(directory / f"{split}.arrow"), tokenised.schema) as file:
            file.write_table(tokenised)
        cache_file.unlink()
        facts["num_samples"][split] = tokenised.num_rows
        counts = np.bincount(tokenised["label"].to_numpy(), minlength=len(labels))
        facts["label_counts"][split] = counts.tolist()
        facts["num_tokens"][split] = len(tokenised["input_ids"].chunk(0).values)
    facts["digest"] = digest.hexdigest()[:16]
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "facts.json").write_text(json.dumps(facts))


def _describe_lengths(lengths: pa.ChunkedArray, max_seq_length: int) -> dict[str, int]:
    import pyarrow.compute as pc

    half, most, longest = pc.quantile(lengths, q=[0.5, 0.95, 1.0], interpolation="lower").to_pylist()
    cut = pc.sum(pc.greater(lengths, max_seq_length)).as_py()
    return {"p50": half, "p95": most, "max": longest, "cut": cut}


def train_wordpiece(texts: list[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerBase:
    """Learns a lower-casing WordPiece vocabulary of at most `vocab_size` entries, as BERT's."""
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

    # The trainer numbers the characters inside words as it meets them, in an order that changes from
    # call to call, and which pieces it then joins depends on their numbers. So they are numbered first.
    inner_characters = sorted(entry for entry in learn(special_tokens) if entry.startswith("##") and len(entry) == 3)
    vocabulary = learn([*special_tokens, *inner_characters])
    pipeline = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    entries = {entry: number for number, entry in enumerate(vocabulary)}
    # A new one, to which those characters are no special tokens.
    tokenizer = Tokenizer(models.WordPiece(entries, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = pipeline
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **_SPECIAL_TOKENS)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Loads a pretrained model's own tokenizer.

    Raises:
        TaskInputError: transformers cannot make one of that directory, or it cannot pad.
    """
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # its warnings would stand before the one line of an error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged tokenizer surfaces as whatever its parser raises
        reason = " ".join(str(error).split())[:300]
        raise TaskInputError(
            f"--model {directory}: its tokenizer cannot be loaded ({reason}); save it again"
        ) from error
    if tokenizer.pad_token_id is None:
        raise TaskInputError(f"--model {directory}: its tokenizer has no padding token; set pad_token and save it")
    return tokenizer
