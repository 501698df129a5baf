"""Tokenised texts on disk: written once by one process, then memory-mapped by every rank.

A prepared dataset is a directory of the cache whose name is a hash of everything it depends on. It appears there
through one rename, complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from tasks.cache import cache_directory
from tasks.interface import Split, TaskInputError
from tasks.text.facts import text_facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FORMAT = 7


@dataclass(frozen=True)
class PreparedText:
    """A prepared dataset's directory and the facts in it.

    Attributes:
        directory: It holds train.arrow and validation.arrow, with the columns input_ids and label, and tokenizer/.
        labels: All labels in order; a sample's target is an index into this list.
        pad_token_id: The token number that pads input_ids.
        num_samples: For each split its number of samples.
        label_counts: For each split the number of samples of each label.
        num_tokens: For each split its number of tokens, special ones included.
        lengths: For each split the tokens of a text before it was cut: the median as `p50`, the 95th percentile as
            `p95`, the longest as `max`; and how many texts were `cut`.
        texts: The counts of `text_facts`.
        digest: The first 16 hexadecimal digits of a SHA-256 of all texts and labels.
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
        """Maps the samples of a split into memory.

        Args:
            split: "train" or "validation".

        Returns:
            Its tokens and labels.
        """
        return TokenTable(self.directory / f"{split}.arrow")

    def as_dataset(self, split: Split) -> Dataset:
        """Maps the samples of a split into memory for Hugging Face's libraries.

        Args:
            split: "train" or "validation".

        Returns:
            A dataset with the columns input_ids and label.
        """
        from datasets import Dataset

        return Dataset(_mapped(self.directory / f"{split}.arrow"))


class TokenTable:
    """The samples of one split, memory-mapped, so that the ranks of a machine share the pages.

    See "Memory-Mapped Files and Streaming" in https://arrow.apache.org/docs/python/ipc.html.

    Args:
        path: A file that `write_prepared` wrote.
    """

    def __init__(self, path: Path) -> None:
        table = _mapped(path)
        tokens = table["input_ids"].chunk(0)
        self._tokens = _as_numpy(tokens.values)
        self._offsets = _as_numpy(tokens.offsets)
        self._labels = _as_numpy(table["label"].chunk(0))
        self._path = path

    def __reduce__(self) -> tuple[type[TokenTable], tuple[Path]]:
        """Pickles the path alone: another process maps the same pages."""
        return TokenTable, (self._path,)

    def tokens(self, sample_id: int) -> npt.NDArray[np.int32]:
        """Reads one sample.

        Args:
            sample_id: A sample number.

        Returns:
            Token numbers [length], special ones included.
        """
        tokens: npt.NDArray[np.int32] = self._tokens[self._offsets[sample_id] : self._offsets[sample_id + 1]]
        return tokens

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each sample, special ones included."""
        lengths: npt.NDArray[np.int32] = self._offsets[1:] - self._offsets[:-1]
        return lengths

    def labels(self, sample_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Reads the targets of some samples.

        Args:
            sample_ids: Sample numbers.

        Returns:
            Label numbers [len(sample_ids)].
        """
        labels: npt.NDArray[np.int64] = self._labels[sample_ids]
        return labels


def _mapped(path: Path) -> pa.Table:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _as_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """Returns the numbers of an array without nulls, without a copy.

    `Array.to_numpy` would import pandas, which takes most of a second of each rank.
    """
    import numpy as np

    numbers = np.frombuffer(array.buffers()[-1], dtype=array.type.to_pandas_dtype())
    return numbers[array.offset : array.offset + len(array)]


def fingerprint(path: Path) -> list[list[Any]]:
    """Identifies the present content of a file or a directory without reading it.

    Args:
        path: A file, or a directory, which stands for all files below it.

    Returns:
        For each file its path, its size in bytes, and the time of its last change in nanoseconds.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def find_or_prepare(key: dict[str, Any], build: Callable[[Path], None]) -> PreparedText:
    """Opens a prepared dataset; if it is not in the cache, one process writes it while others wait.

    Args:
        key: Everything that the dataset depends on, as JSON values.
        build: Fills an empty directory, as `write_prepared` does.

    Returns:
        The prepared dataset.

    Raises:
        TaskInputError: The cache cannot be written, or `build` refuses its input.
    """
    from filelock import FileLock

    digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()[:24]
    parent = cache_directory() / "text"
    target = parent / digest
    if not target.exists():
        with _writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(parent / f"{digest}.lock")
            lock.acquire()
        try:
            if not target.exists():
                with _writing(parent):
                    _build_once(target, build)
        finally:
            lock.release()
    return PreparedText(directory=target, **json.loads((target / "facts.json").read_text()))


def _build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Fills a directory under another name, and renames it once it is complete."""
    unfinished = Path(mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        build(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _writing(parent: Path) -> Iterator[None]:
    """Says that the cache cannot be written, for instance because the disk is full; an error of another file passes."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            named = Path(error.filename)
            if not (named.is_relative_to(parent) or parent.is_relative_to(named)):
                raise
        reason = error.strerror or " ".join(str(error).split())[:300]  # Arrow's errors may have no number
        raise TaskInputError(
            f"{parent}: cannot be written ({reason}); set LOCKSTEP_CACHE to another directory"
        ) from error


def write_prepared(
    directory: Path,
    tables: dict[Split, pa.Table],
    labels: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
) -> None:
    """Tokenises both splits.

    Args:
        directory: An empty directory, which receives the files of `PreparedText`.
        tables: For each split a table with the string columns "text" and "label".
        labels: All labels in order.
        tokenizer: It turns texts into token numbers, and is saved beside them.
        max_seq_length: Texts are cut to so many tokens, special ones included.
    """
    facts: dict[str, Any] = {"labels": labels, "pad_token_id": tokenizer.pad_token_id}
    facts |= {"num_samples": {}, "label_counts": {}, "num_tokens": {}, "lengths": {}}
    facts["texts"] = text_facts(tables, labels)
    facts["digest"] = _digest(tables)
    for split, table in tables.items():
        tokenised = _tokenise(table, labels, tokenizer, max_seq_length, scratch=directory / f"{split}.map")
        for fact, value in _describe(tokenised, len(labels), max_seq_length).items():
            facts[fact][split] = value
        _write_table(tokenised.drop_columns(["length"]), directory / f"{split}.arrow")
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "facts.json").write_text(json.dumps(facts))


def _digest(tables: dict[Split, pa.Table]) -> str:
    digest = hashlib.sha256()
    for table in tables.values():
        # In pieces of one size, whatever the sizes in which the rows were read.
        for batch in table.select(["text", "label"]).combine_chunks().to_batches(max_chunksize=1000):
            digest.update(json.dumps(batch.to_pydict()).encode())
    return digest.hexdigest()[:16]


def _tokenise(
    table: pa.Table, labels: list[str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int, *, scratch: Path
) -> pa.Table:
    """Returns the columns input_ids, label and length: a text's number of tokens before it was cut."""
    import datasets

    index = {label: number for number, label in enumerate(labels)}

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(rows["text"], truncation=True, max_length=max_seq_length)["input_ids"]
        lengths = [len(tokens) for tokens in ids]
        # Only a text that has the largest length can have been cut.
        full = [number for number, length in enumerate(lengths) if length == max_seq_length]
        if full:
            whole = tokenizer([rows["text"][number] for number in full], verbose=False)["input_ids"]
            for number, tokens in zip(full, whole, strict=True):
                lengths[number] = len(tokens)
        return {"input_ids": ids, "label": [index[label] for label in rows["label"]], "length": lengths}

    datasets.disable_progress_bars()
    columns = datasets.Features({"input_ids": datasets.List(datasets.Value("int32")), "label": datasets.Value("int64")})
    columns["length"] = datasets.Value("int64")
    rows = datasets.Dataset(table)
    encoded = rows.map(
        encode,
        batched=True,
        remove_columns=rows.column_names,
        features=columns,
        cache_file_name=str(scratch),
    )
    # In one piece, so that a sample is found by its offset alone.
    tokenised = encoded.data.table.combine_chunks()
    scratch.unlink()
    return tokenised


def _describe(tokenised: pa.Table, num_labels: int, max_seq_length: int) -> dict[str, Any]:
    """Counts the facts of one split."""
    import numpy as np
    import pyarrow.compute as pc

    lengths = tokenised["length"]
    half, most, longest = pc.quantile(lengths, q=[0.5, 0.95, 1.0], interpolation="lower").to_pylist()
    cut = pc.sum(pc.greater(lengths, max_seq_length)).as_py()
    return {
        "num_samples": tokenised.num_rows,
        "label_counts": np.bincount(tokenised["label"].to_numpy(), minlength=num_labels).tolist(),
        "num_tokens": len(tokenised["input_ids"].chunk(0).values),
        "lengths": {"p50": half, "p95": most, "max": longest, "cut": cut},
    }


def _write_table(table: pa.Table, path: Path) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
