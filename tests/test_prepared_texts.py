"""Texts in the cache: what they depend on, which vocabularies fit, and what is refused on the way there."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest

from tasks.interface import TaskInputError
from tasks.text import prepared
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings


def _task(**settings: Any) -> TextClassification:
    task = TextClassification(TextClassificationSettings(**settings))
    task.prepare()
    return task


def test_every_file_of_a_pretrained_tokenizer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _task().save(_task().build_model(), tmp_path)
    tokenizers: set[str] = set()

    def note(key: dict[str, Any], build: Any) -> None:
        tokenizers.add(json.dumps(key["tokenizer"]))
        raise TaskInputError("enough is known")

    monkeypatch.setattr(prepared, "find_or_prepare", note)
    names = ("tokenizer.json", "config.json", "merges.txt", "spiece.model")
    for name in names:
        with (tmp_path / name).open("a") as file:
            file.write(" ")
        with pytest.raises(TaskInputError, match="enough is known"):
            _task(model=str(tmp_path))
    assert len(tokenizers) == len(names)


def test_a_vocabulary_has_room_for_every_character_of_the_texts(tmp_path: Path) -> None:
    """The trainer keeps them all, and the embedding would have fewer rows than there are token numbers."""
    rows = [{"text": chr(0x4E00 + number), "label": number % 2} for number in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {"train_file": file, "validation_file": file}
    with pytest.raises(
        TaskInputError, match=r"^--vocab-size 200: .* alone take (\d+) entries; choose \1 or"
    ) as refusal:
        _task(vocab_size=200, **files)
    found = re.search(r"choose (\d+) or more", str(refusal.value))
    assert found
    needed = int(found[1])
    assert needed >= 300
    assert int(_task(vocab_size=needed, **files).collate("train", range(300)).tensors["input_ids"].max()) < needed
    with pytest.raises(TaskInputError, match=f"--vocab-size {needed - 1}: "):
        _task(vocab_size=needed - 1, **files)


def test_a_data_set_whose_text_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    options = pyarrow.compute.CastOptions(target_type=pa.string(), allow_invalid_utf8=True)
    texts = pyarrow.compute.cast(pa.array([b"caf\xe9", b"tea"]), options=options)
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pa.table({"text": texts, "label": ["yes", "no"]}), tmp_path / f"{split}.parquet")
    with pytest.raises(TaskInputError, match=r"^--dataset .*: cannot be read \(.*UTF-?8.*\); correct its rows$"):
        _task(dataset=str(tmp_path))


def test_a_cache_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))

    def fill(directory: Path) -> None:
        (directory / "train.arrow").touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / "train.arrow"))

    def miss(directory: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "rows.csv"))

    with pytest.raises(TaskInputError, match=r"cache/text: cannot be written \(No space left on device\); set LOCK"):
        prepared.find_or_prepare({}, fill)
    with pytest.raises(FileNotFoundError):
        prepared.find_or_prepare({}, miss)
    assert not [path for path in (tmp_path / "cache" / "text").iterdir() if path.is_dir()]
