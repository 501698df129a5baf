"""The options of the task that classifies texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from tasks.interface import TaskSettings
from tasks.text import models as bert_models


class TextClassificationSettings(TaskSettings):
    """The model and where the texts come from."""

    model: str = Field(
        "bert-tiny",
        min_length=1,
        description=f"a preset with fresh weights ({', '.join(bert_models.PRESETS)}), or pretrained weights: "
        "a directory or a hub id",
    )
    vocab_size: int | None = Field(
        None,
        ge=200,
        le=bert_models.VOCAB_SIZE,
        description=f"entries of a preset's vocabulary, and rows of its embedding (default: {bert_models.VOCAB_SIZE})",
    )
    train_file: Path | None = Field(None, description="training rows: csv, tsv, jsonl or parquet")
    validation_file: Path | None = Field(None, description="validation rows, in the same columns")
    text_column: str = Field("text", description="the column that holds the text")
    label_column: str = Field("label", description="the column that holds the label, a string or a number")
    keep_labels: bool = Field(
        False, description="make every label a class, even if labels look alike, look like missing values, or are many"
    )
    positive_label: str | None = Field(
        None,
        min_length=1,
        description="of two labels, the one whose F1 is reported (default: the larger number, or the rarer label)",
    )
    dataset: str | None = Field(
        None, min_length=1, description="a dataset of the hub (NAME or NAME:CONFIG), or a directory"
    )
    max_seq_length: int = Field(128, ge=4, description="longer texts are cut to this many tokens")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout probability (default: pretrained weights keep theirs, presets have 0)"
    )

    def fetched(self) -> tuple[str, ...]:
        """Names those of `model` and `dataset` that are on the hub."""
        names = []
        if self.model not in bert_models.PRESETS and not Path(self.model).exists():
            names.append("model")
        if self.dataset is not None and not Path(self.dataset.partition(":")[0]).exists():
            names.append("dataset")
        return tuple(names)

    def of_race(self) -> dict[str, Any]:
        """Leaves the embedding of the default model as many rows as the embedded texts need.

        With the published vocabulary, nine parameters of ten would be rows that no text uses, and that ranks
        communicate all the same. In BERT-base it is two of ten.
        """
        return {} if self.model_fields_set & {"model", "vocab_size", "train_file", "dataset"} else {"vocab_size": 1000}

    # The ranks read these settings again, in another working directory than the user's.
    @field_validator("train_file", "validation_file")
    @classmethod
    def _absolute_file(cls, path: Path | None) -> Path | None:
        return path.absolute() if path is not None else None

    @field_validator("model", "dataset")
    @classmethod
    def _absolute_directory(cls, name: str | None) -> str | None:
        if name is None or name in bert_models.PRESETS or not Path(name.partition(":")[0]).is_dir():
            return name
        return str(Path(name).absolute())
