"""Fine-tuning a BERT-style model to classify texts, on Hugging Face parts."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from tasks import bert_models, grammar, prepared_text, text_sources
from tasks.interface import Batch, Split, Task, TaskInputError, TaskSettings


class TextClassificationSettings(TaskSettings):
    """The model and where the texts come from."""

    model: str = Field(
        "bert-tiny",
        min_length=1,
        description=f"a preset with fresh weights ({', '.join(bert_models.PRESETS)}), or pretrained weights: "
        "a directory or a hub id",
    )
    train_file: Path | None = Field(None, description="training rows: csv, tsv, jsonl or parquet")
    validation_file: Path | None = Field(None, description="validation rows, in the same columns")
    text_column: str = Field("text", description="the column that holds the text")
    label_column: str = Field("label", description="the column that holds the label, a string or a number")
    dataset: str | None = Field(
        None, min_length=1, description="a data set of the hub (NAME or NAME:CONFIG), or its directory"
    )
    max_seq_length: int = Field(128, ge=4, description="longer texts are cut to this many tokens")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout probability (default: pretrained weights keep theirs, presets have 0)"
    )

    def fetched(self) -> tuple[str, ...]:
        names = []
        if self.model not in bert_models.PRESETS and not Path(self.model).exists():
            names.append("model")
        if self.dataset is not None and not Path(self.dataset.partition(":")[0]).exists():
            names.append("dataset")
        return tuple(names)

    # The ranks that read these settings again work in another directory than the user.
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


class TextClassification(Task):
    """Classifies texts, each into one of the labels that occur in training."""

    name = "text-classification"
    Settings = TextClassificationSettings
    settings: TextClassificationSettings
    metric_names = ("loss", "accuracy", "f1", "roc_auc")

    def prepare(self) -> None:
        self._check_sources()
        settings = self.settings
        self._pretrained = None
        if settings.model not in bert_models.PRESETS:
            self._pretrained = bert_models.find_pretrained(settings.model)
        self._check_length()
        key = {"source": self._source_key(), "max_seq_length": settings.max_seq_length}
        key["columns"] = [settings.text_column, settings.label_column]
        key["tokenizer"] = "wordpiece trained on the texts"
        if self._pretrained:
            files = sorted(file for pattern in ("*token*", "vocab*") for file in self._pretrained.glob(pattern))
            key["tokenizer"] = [prepared_text.fingerprint(file) for file in files]
            key["labels"] = bert_models.own_labels(self._pretrained)
        self._data = prepared_text.find_or_prepare(key, self._build)
        self._tables: dict[Split, prepared_text.TokenTable] = {}

    def _check_sources(self) -> None:
        settings = self.settings
        if settings.dataset is not None and (settings.train_file or settings.validation_file):
            raise TaskInputError(f"--dataset {settings.dataset}: give either a data set or files, not both")
        if (settings.train_file is None) != (settings.validation_file is None):
            missing = "--validation-file" if settings.validation_file is None else "--train-file"
            raise TaskInputError(f"{missing} is missing: training and validation need a file each")
        if settings.text_column == settings.label_column:
            raise TaskInputError(
                f"--text-column and --label-column are both {settings.text_column!r}; name two columns"
            )
        for path, option in ((settings.train_file, "--train-file"), (settings.validation_file, "--validation-file")):
            if path is not None:
                text_sources.check_file(path, option=option)

    def _check_length(self) -> None:
        limit = bert_models.MAX_POSITIONS
        if self._pretrained:
            limit = bert_models.count_positions(self._pretrained)
        if self.settings.max_seq_length > limit:
            raise TaskInputError(
                f"--max-seq-length {self.settings.max_seq_length}: {self.settings.model} has {limit} positions; "
                f"choose {limit} or less"
            )

    def _source_key(self) -> Any:
        settings = self.settings
        if settings.dataset is not None:
            directory = Path(settings.dataset.partition(":")[0])
            return [settings.dataset, prepared_text.fingerprint(directory) if directory.is_dir() else "hub"]
        if settings.train_file and settings.validation_file:
            return [prepared_text.fingerprint(file) for file in (settings.train_file, settings.validation_file)]
        source = Path(grammar.__file__).read_bytes()
        return ["embedded", text_sources.NUM_EMBEDDED, hashlib.sha256(source).hexdigest()]

    def _build(self, directory: Path) -> None:
        settings = self.settings
        columns = {"text_column": settings.text_column, "label_column": settings.label_column}
        tables: dict[Split, Any]
        sources: dict[Split, str]
        if settings.dataset is not None:
            sources = dict.fromkeys(("train", "validation"), f"--dataset {settings.dataset}")
            tables = text_sources.hub_tables(settings.dataset, **columns)
        elif settings.train_file and settings.validation_file:
            sources = {
                "train": f"--train-file {settings.train_file}",
                "validation": f"--validation-file {settings.validation_file}",
            }
            tables = {
                "train": text_sources.read_file(settings.train_file, option="--train-file", **columns),
                "validation": text_sources.read_file(settings.validation_file, option="--validation-file", **columns),
            }
        else:
            sources = dict.fromkeys(("train", "validation"), "the embedded data")
            tables = text_sources.embedded_tables()
        labels = text_sources.label_names(tables, sources)
        if self._pretrained:
            tokenizer = prepared_text.load_tokenizer(self._pretrained)
            known = bert_models.own_labels(self._pretrained)
            # Its classifier's rows are in this order.
            labels = known if sorted(known) == sorted(labels) else labels
        else:
            tokenizer = prepared_text.train_wordpiece(
                tables["train"]["text"].to_pylist(),
                vocab_size=bert_models.VOCAB_SIZE,
                max_length=bert_models.MAX_POSITIONS,
            )
        prepared_text.write_prepared(directory, tables, labels, tokenizer, settings.max_seq_length)

    def num_samples(self, split: Split) -> int:
        return self._data.num_samples[split]

    @property
    def default_learning_rate(self) -> float:
        return 5e-4 if self._pretrained is None else 5e-5

    def build_model(self) -> Any:
        labels, dropout = self._data.labels, self.settings.dropout
        if self._pretrained:
            return bert_models.load_pretrained(self._pretrained, labels=labels, dropout=dropout)
        return bert_models.build_preset(
            self.settings.model, labels=labels, pad_token_id=self._data.pad_token_id, dropout=dropout or 0.0
        )

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        if split not in self._tables:
            self._tables[split] = self._data.open(split)
        table = self._tables[split]
        tokens = [torch.from_numpy(table.tokens(sample_id).astype("int64")) for sample_id in sample_ids]
        lengths = torch.tensor([len(ids) for ids in tokens])
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=self._data.pad_token_id)
        tensors = {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "labels": torch.from_numpy(table.labels(sample_ids)),
        }
        return Batch(tensors, int(lengths.sum()), input_ids.numel())

    def loss_sum(self, model: Any, batch: Batch) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(self._logits(model, batch), batch.tensors["labels"], reduction="sum")

    def _logits(self, model: Any, batch: Batch) -> Any:
        outputs = model(input_ids=batch.tensors["input_ids"], attention_mask=batch.tensors["attention_mask"])
        # By key, since Apex's casting levels turn outputs into plain dicts. In float32, since
        # under autocast some backends hand out half precision and others do not.
        return outputs["logits"].float()

    def evaluation_rows(self, model: Any, batch: Batch) -> Any:
        import torch
        from torch.nn.functional import cross_entropy

        logits, labels = self._logits(model, batch), batch.tensors["labels"]
        losses = cross_entropy(logits, labels, reduction="none")
        columns = [losses[:, None].double(), labels[:, None].double(), torch.softmax(logits.double(), dim=1)]
        return torch.cat(columns, dim=1)

    @property
    def num_evaluation_columns(self) -> int:
        return 2 + len(self._data.labels)

    def metrics(self, rows: Any) -> dict[str, float | None]:
        """Loss, accuracy, F1 (binary: of the second label; else macro) and ROC AUC (else macro, one-vs-rest)."""
        from torchmetrics.functional import classification as scores

        losses, labels, probabilities = rows[:, 0], rows[:, 1].long(), rows[:, 2:]
        predicted, num_labels = probabilities.argmax(dim=1), probabilities.shape[1]
        # The area is undefined as soon as some label does not occur among the samples.
        defined = len(labels.unique()) == num_labels
        if num_labels == 2:
            f1 = scores.binary_f1_score(predicted, labels)
            area = scores.binary_auroc(probabilities[:, 1], labels) if defined else None
        else:
            f1 = scores.multiclass_f1_score(predicted, labels, num_classes=num_labels, average="macro")
            area = scores.multiclass_auroc(probabilities, labels, num_classes=num_labels) if defined else None
        return {
            "loss": losses.mean().item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "f1": f1.item(),
            "roc_auc": None if area is None else area.item(),
        }

    def describe(self) -> dict[str, Any]:
        data = self._data
        return {
            "data": self.settings.dataset or str(self.settings.train_file or "embedded"),
            "data_digest": data.digest,
            "model": self.settings.model,
            "model_shape": bert_models.encoder_shape(self.settings.model, self._pretrained),
            "dropout": bert_models.dropout_in_force(self.settings.dropout, self._pretrained),
            "labels": data.labels,
            "num_samples": data.num_samples,
            "num_tokens": data.num_tokens,
            "majority_share": {
                split: max(counts) / data.num_samples[split] for split, counts in data.label_counts.items()
            },
        }

    def save(self, model: Any, directory: Path) -> None:
        model.save_pretrained(directory)
        for file in (self._data.directory / "tokenizer").iterdir():
            shutil.copy(file, directory)
