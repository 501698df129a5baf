"""Training a BERT classifier for texts, from fresh or pretrained weights, with Hugging Face's libraries."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.classes import baseline, majority
from tasks.classification import Classification
from tasks.interface import Batch, Overview, Split, TaskInputError, draws_nothing
from tasks.text import grammar, labels, packing
from tasks.text import models as bert_models
from tasks.text import prepared as prepared_text
from tasks.text.files import check_file, read_file
from tasks.text.hub import hub_tables
from tasks.text.overview import text_overview
from tasks.text.settings import TextClassificationSettings
from tasks.text.tokenizers import load_tokenizer, train_wordpiece

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.text.batches import Texts


# What a pretrained tokenizer is made of; config.json may name its class.
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "config.json")


class TextClassification(Classification):
    """Assigns to each text one of the labels that occur in training."""

    name = "text-classification"
    Settings = TextClassificationSettings
    settings: TextClassificationSettings
    imported_modules = (
        "transformers.modeling_utils",
        "tasks.text.attention",
        "tasks.text.batches",
        "tasks.text.dropout",
    )
    model_files = ("config.json", "model*.safetensors", "model.safetensors.index.json", "*token*.json", "vocab.txt")

    def prepare(self) -> None:
        """Checks the options and the data, and tokenises the texts unless they are in the cache."""
        self._check_sources()
        settings = self.settings
        self._pretrained = None
        if settings.model not in bert_models.PRESETS:
            self._pretrained = bert_models.find_pretrained(settings.model)
            if settings.vocab_size is not None:
                raise TaskInputError(
                    f"--vocab-size {settings.vocab_size}: {settings.model} has a vocabulary of its own; leave it out"
                )
            if settings.dropout is not None:
                bert_models.dropout_options(self._pretrained, settings.dropout)
        self._check_length()
        self._refuses_rows = packing.packing_refusal(self._pretrained)
        key = {"source": self._source_key(), "max_seq_length": settings.max_seq_length}
        key["columns"] = [settings.text_column, settings.label_column]
        key["keep_labels"] = settings.keep_labels
        key["tokenizer"] = f"wordpiece of {self._vocab_size} entries trained on the texts"
        if self._pretrained:
            files = sorted({file for pattern in _TOKENIZER_FILES for file in self._pretrained.glob(pattern)})
            key["tokenizer"] = [prepared_text.fingerprint(file) for file in files]
            key["labels"] = bert_models.own_labels(self._pretrained)
        self._data = prepared_text.find_or_prepare(key, self._build)
        self._first_position = packing.first_position(self._pretrained, self._data.pad_token_id)
        # The embedded data define which of their labels is the positive one.
        asked = settings.positive_label or (grammar.LABELS[True] if self._is_embedded else None)
        self._positive = labels.positive_label(self._data.labels, self._data.label_counts["train"], asked=asked)
        if self._positive is None:
            self.metric_names = tuple(name for name in self.metric_names if name != "f1")
        self._tables: dict[Split, prepared_text.TokenTable] = {}

    @property
    def _vocab_size(self) -> int:
        return self.settings.vocab_size or bert_models.VOCAB_SIZE

    @property
    def _is_embedded(self) -> bool:
        return self.settings.dataset is None and self.settings.train_file is None

    def _check_sources(self) -> None:
        settings = self.settings
        if settings.dataset is not None and (settings.train_file or settings.validation_file):
            raise TaskInputError(f"--dataset {settings.dataset}: give either a dataset or files, not both")
        if (settings.train_file is None) != (settings.validation_file is None):
            missing = "--validation-file" if settings.validation_file is None else "--train-file"
            raise TaskInputError(f"{missing} is missing: training and validation each need a file")
        if settings.text_column == settings.label_column:
            raise TaskInputError(
                f"--text-column and --label-column are both {settings.text_column!r}; name two different columns"
            )
        for path, option in ((settings.train_file, "--train-file"), (settings.validation_file, "--validation-file")):
            if path is not None:
                check_file(path, option=option)

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
        return ["embedded", hashlib.sha256(source).hexdigest()]

    def _build(self, directory: Path) -> None:
        settings = self.settings
        columns = {"text_column": settings.text_column, "label_column": settings.label_column}
        tables: dict[Split, Any]
        sources: dict[Split, str]
        if settings.dataset is not None:
            sources = dict.fromkeys(("train", "validation"), f"--dataset {settings.dataset}")
            tables = hub_tables(settings.dataset, **columns)
        elif settings.train_file and settings.validation_file:
            sources = {
                "train": f"--train-file {settings.train_file}",
                "validation": f"--validation-file {settings.validation_file}",
            }
            tables = {
                "train": read_file(settings.train_file, option="--train-file", **columns),
                "validation": read_file(settings.validation_file, option="--validation-file", **columns),
            }
        else:
            sources = dict.fromkeys(("train", "validation"), "the embedded data")
            tables = grammar.embedded_tables()
        names = labels.label_names(labels.count_labels(tables), sources, keep_labels=settings.keep_labels)
        if self._pretrained:
            tokenizer = load_tokenizer(self._pretrained)
            known = bert_models.own_labels(self._pretrained)
            # The rows of its classifier are in this order.
            names = known if sorted(known) == sorted(names) else names
        else:
            tokenizer = train_wordpiece(
                tables["train"]["text"].to_pylist(),
                vocab_size=self._vocab_size,
                max_length=bert_models.MAX_POSITIONS,
            )
        prepared_text.write_prepared(directory, tables, names, tokenizer, settings.max_seq_length)

    def num_samples(self, split: Split) -> int:
        """Counts the rows of a split."""
        return self._data.num_samples[split]

    def costs(self, split: Split) -> npt.NDArray[np.int64] | None:
        """Counts the multiplications of a layer, up to a factor.

        In a layer of width h, a text of n tokens takes 12 h^2 n of them with weights and 2 h n^2 in attention
        (Kaplan et al. 2020, table 1, https://arxiv.org/abs/2001.08361, with the usual feed-forward width of 4 h).
        """
        import numpy as np

        shape = bert_models.encoder_shape(self.settings.model, self._pretrained)
        lengths = self._table(split).lengths.astype(np.int64)
        return lengths if shape is None else lengths * (6 * shape["hidden_size"] + lengths)

    @property
    def default_learning_rate(self) -> float:
        """For pretrained weights the largest that the BERT paper recommends, in appendix A.3; more for fresh ones.

        See https://arxiv.org/abs/1810.04805.
        """
        return 5e-4 if self._pretrained is None else 5e-5

    def build_model(self) -> PreTrainedModel:
        """Builds a preset, or loads pretrained weights below a classifier; where that is possible, it takes rows."""
        model = self.hugging_face_model()
        if self._refuses_rows is None:
            packing.take_rows(model)
        return model

    @draws_nothing
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Pads texts to the longest of the batch; the tensors are those of `batches.padded_batch`.

        The meaning of those for the model is that of
        https://huggingface.co/docs/transformers/model_doc/bert#transformers.BertForSequenceClassification.
        """
        from tasks.text.batches import padded_batch

        return padded_batch(self._texts(split, sample_ids), pad_token_id=self._data.pad_token_id)

    def packing_refusal(self) -> str | None:
        """Says whether the attention of the model can be kept within a sample."""
        return self._refuses_rows

    @draws_nothing
    def collate_packed(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Puts texts one after the other in a row; the tensors are those of `batches.packed_batch`."""
        from tasks.text.batches import packed_batch

        texts = self._texts(split, sample_ids)
        return packed_batch(texts, pad_token_id=self._data.pad_token_id, first_position=self._first_position)

    def _texts(self, split: Split, sample_ids: Sequence[int]) -> Texts:
        from tasks.text.batches import Texts

        table = self._table(split)
        return Texts(sample_ids, [table.tokens(sample_id) for sample_id in sample_ids], table.labels(sample_ids))

    def _table(self, split: Split) -> prepared_text.TokenTable:
        if split not in self._tables:
            self._tables[split] = self._data.open(split)
        return self._tables[split]

    @property
    def labels(self) -> list[str]:
        """The labels that occur in training."""
        return self._data.labels

    @property
    def positive_label(self) -> str | None:
        """The one that the user has named, or that is positive or rarer."""
        return self._positive

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Passes the texts through the model."""
        import torch

        from tasks.text.batches import MODEL_INPUTS

        options: dict[str, Any] = {name: batch.tensors[name] for name in MODEL_INPUTS if name in batch.tensors}
        if self._refuses_rows is None:
            if batch.num_tokens == batch.num_positions:
                # Without a mask, faster kernels compute attention. What other models do without one is not known.
                options.pop("attention_mask", None)
            options |= packing.row_options(batch, is_training=model.training)
        outputs = model(**options)
        # By key, since Apex turns the outputs into a plain dict where it casts the model.
        logits: torch.Tensor = outputs["logits"]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def describe(self) -> dict[str, Any]:
        """Collects the origin and the counts of the data, the sizes of the model, and the baseline."""
        data = self._data
        answer, values = self._baseline()
        return {
            "data": self._origin,
            "data_digest": data.digest,
            "model": self.settings.model,
            "model_shape": bert_models.encoder_shape(self.settings.model, self._pretrained),
            "dropout": bert_models.dropout_in_force(self.settings.dropout, self._pretrained),
            "dropout_by_sample": self._refuses_rows is None,
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
        answer = data.labels[majority(data.label_counts["train"])]
        return answer, baseline(data.labels, data.label_counts, self._positive)

    def overview(self) -> Overview:
        """Tabulates rows, classes and lengths of both splits, and warns of what looks like a mistake."""
        files = self.settings.train_file, self.settings.validation_file
        return text_overview(
            self._data,
            origin=self._origin,
            max_seq_length=self.settings.max_seq_length,
            positive=self._positive,
            baseline=self._baseline(),
            is_same_file=files[0] is not None and files[1] is not None and files[0].samefile(files[1]),
        )

    def hugging_face_model(self) -> PreTrainedModel:
        """Builds the model as transformers has it."""
        names, dropout = self._data.labels, self.settings.dropout
        if self._pretrained:
            return bert_models.load_pretrained(self._pretrained, labels=names, dropout=dropout)
        return bert_models.build_preset(
            self.settings.model,
            labels=names,
            pad_token_id=self._data.pad_token_id,
            dropout=dropout or 0.0,
            vocab_size=self._vocab_size,
        )

    def hugging_face_dataset(self, split: Split) -> Dataset:
        """Opens the samples of a split, memory-mapped, with the columns `input_ids` and `label`."""
        return self._data.as_dataset(split)

    def hugging_face_tokenizer(self) -> PreTrainedTokenizerBase:
        """Loads the tokenizer that the texts were cut with."""
        return load_tokenizer(self._data.directory / "tokenizer")

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Writes model and tokenizer in Hugging Face's format, for `from_pretrained` and `pipeline`."""
        model.save_pretrained(directory)
        for file in (self._data.directory / "tokenizer").iterdir():
            shutil.copy(file, directory)
