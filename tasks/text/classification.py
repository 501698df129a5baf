"""Fine-tuning a BERT-style model to classify texts, on Hugging Face parts."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from tasks.interface import Batch, Overview, Split, Task, TaskInputError, TaskSettings
from tasks.text import grammar, labels
from tasks.text import models as bert_models
from tasks.text import prepared as prepared_text
from tasks.text import sources as text_sources
from tasks.text.overview import text_overview


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
    keep_labels: bool = Field(
        False, description="take every label for a class, also labels that look alike, like missing values, or are many"
    )
    positive_label: str | None = Field(
        None,
        min_length=1,
        description="of two labels, the one whose F1 is told (default: the larger number, or the rarer label)",
    )
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
    metric_names: tuple[str, ...] = ("loss", "accuracy", "f1", "macro_f1", "roc_auc")
    model_files = ("config.json", "model*.safetensors", "model.safetensors.index.json", "*token*.json", "vocab.txt")

    def prepare(self) -> None:
        self._check_sources()
        settings = self.settings
        self._pretrained = None
        if settings.model not in bert_models.PRESETS:
            self._pretrained = bert_models.find_pretrained(settings.model)
        self._check_length()
        key = {"source": self._source_key(), "max_seq_length": settings.max_seq_length}
        key["columns"] = [settings.text_column, settings.label_column]
        key["keep_labels"] = settings.keep_labels
        key["tokenizer"] = "wordpiece trained on the texts"
        if self._pretrained:
            files = sorted(file for pattern in ("*token*", "vocab*") for file in self._pretrained.glob(pattern))
            key["tokenizer"] = [prepared_text.fingerprint(file) for file in files]
            key["labels"] = bert_models.own_labels(self._pretrained)
        self._data = prepared_text.find_or_prepare(key, self._build)
        # The embedded data say themselves which of their labels is meant.
        asked = settings.positive_label or (grammar.LABELS[True] if self._is_embedded else None)
        self._positive = labels.positive_label(self._data.labels, self._data.label_counts["train"], asked=asked)
        if self._positive is None:
            self.metric_names = tuple(name for name in self.metric_names if name != "f1")
        self._tables: dict[Split, prepared_text.TokenTable] = {}

    @property
    def _is_embedded(self) -> bool:
        return self.settings.dataset is None and self.settings.train_file is None

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
        names = labels.label_names(labels.count_labels(tables), sources, keep_labels=settings.keep_labels)
        if self._pretrained:
            tokenizer = prepared_text.load_tokenizer(self._pretrained)
            known = bert_models.own_labels(self._pretrained)
            # Its classifier's rows are in this order.
            names = known if sorted(known) == sorted(names) else names
        else:
            tokenizer = prepared_text.train_wordpiece(
                tables["train"]["text"].to_pylist(),
                vocab_size=bert_models.VOCAB_SIZE,
                max_length=bert_models.MAX_POSITIONS,
            )
        prepared_text.write_prepared(directory, tables, names, tokenizer, settings.max_seq_length)

    def num_samples(self, split: Split) -> int:
        return self._data.num_samples[split]

    @property
    def default_learning_rate(self) -> float:
        return 5e-4 if self._pretrained is None else 5e-5

    def build_model(self) -> Any:
        names, dropout = self._data.labels, self.settings.dropout
        if self._pretrained:
            return bert_models.load_pretrained(self._pretrained, labels=names, dropout=dropout)
        return bert_models.build_preset(
            self.settings.model, labels=names, pad_token_id=self._data.pad_token_id, dropout=dropout or 0.0
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
        """Loss, accuracy, macro F1 and ROC AUC; of two labels F1 and ROC AUC are those of the positive one."""
        from torchmetrics.functional import classification as scores

        losses, targets, probabilities = rows[:, 0], rows[:, 1].long(), rows[:, 2:]
        predicted, num_labels = probabilities.argmax(dim=1), probabilities.shape[1]
        # The area is undefined as soon as some label does not occur among the samples.
        defined, area = len(targets.unique()) == num_labels, None
        macro_f1 = scores.multiclass_f1_score(predicted, targets, num_classes=num_labels, average="macro")
        metrics = {
            "loss": losses.mean().item(),
            "accuracy": (predicted == targets).double().mean().item(),
            "macro_f1": macro_f1.item(),
        }
        if self._positive is not None:
            number = self._data.labels.index(self._positive)
            is_positive = (targets == number).long()
            metrics["f1"] = scores.binary_f1_score((predicted == number).long(), is_positive).item()
            area = scores.binary_auroc(probabilities[:, number], is_positive) if defined else None
        elif defined:
            area = scores.multiclass_auroc(probabilities, targets, num_classes=num_labels)
        return {**metrics, "roc_auc": None if area is None else area.item()}

    def describe(self) -> dict[str, Any]:
        data = self._data
        answer, values = self._baseline()
        return {
            "data": self._origin,
            "data_digest": data.digest,
            "model": self.settings.model,
            "model_shape": bert_models.encoder_shape(self.settings.model, self._pretrained),
            "dropout": bert_models.dropout_in_force(self.settings.dropout, self._pretrained),
            "labels": data.labels,
            "label_counts": data.label_counts,
            "positive_label": self._positive,
            "num_samples": data.num_samples,
            "lengths": data.lengths,
            "texts": data.texts,
            "num_tokens": data.num_tokens,
            "majority_share": {
                split: max(counts) / data.num_samples[split] for split, counts in data.label_counts.items()
            },
            "baseline": {"answer": answer, "metrics": values},
        }

    @property
    def _origin(self) -> str:
        return self.settings.dataset or str(self.settings.train_file or "embedded")

    def _baseline(self) -> tuple[str, dict[str, float]]:
        data = self._data
        answer = data.labels[labels.majority(data.label_counts["train"])]
        return answer, labels.baseline(data.labels, data.label_counts, self._positive)

    def overview(self) -> Overview:
        files = self.settings.train_file, self.settings.validation_file
        return text_overview(
            self._data,
            origin=self._origin,
            max_seq_length=self.settings.max_seq_length,
            positive=self._positive,
            baseline=self._baseline(),
            is_same_file=files[0] is not None and files[1] is not None and files[0].samefile(files[1]),
        )

    def save(self, model: Any, directory: Path) -> None:
        model.save_pretrained(directory)
        for file in (self._data.directory / "tokenizer").iterdir():
            shutil.copy(file, directory)
