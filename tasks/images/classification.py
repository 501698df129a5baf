"""Training a ResNet on small grey images: FashionMNIST's files, or drawn shapes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.classes import Row, aligned, baseline, baseline_row, class_rows, class_warnings, counts_of, majority
from tasks.classification import Classification
from tasks.images import drawing, idx, models
from tasks.images.drawing import Images
from tasks.images.settings import ImageClassificationSettings
from tasks.interface import Batch, Overview, Split, draws_nothing

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

# Each split is drawn from a seed of its own.
_SEEDS: dict[Split, int] = {"train": 1, "validation": 2}


class ImageClassification(Classification):
    """Assigns to each image one of ten classes. Its models have BatchNorm, which looks at whole micro-batches."""

    name = "image-classification"
    Settings = ImageClassificationSettings
    settings: ImageClassificationSettings
    metric_names = ("loss", "accuracy", "macro_f1", "roc_auc")
    model_files = ("config.json", "model*.safetensors", "model.safetensors.index.json")
    has_batch_norm = True
    imported_modules = ("transformers.models.resnet.modeling_resnet",)

    def prepare(self) -> None:
        """Reads or draws the images, and counts them."""
        images = self._images
        self._labels = list(drawing.SHAPES)
        if self.settings.data_dir is not None:
            self._labels = [str(number) for number in range(idx.NUM_CLASSES)]
        self._num_samples: dict[str, int] = {split: len(own.labels) for split, own in images.items()}
        self._image_size = images["train"].pixels.shape[1:]
        digest = hashlib.sha256()
        self._label_counts: dict[str, list[int]] = {}
        for split, (pixels, labels) in images.items():
            digest.update(pixels.data)
            digest.update(labels.data)
            self._label_counts[split] = [int((labels == number).sum()) for number in range(len(self._labels))]
        self._digest = digest.hexdigest()[:16]

    @functools.cached_property
    def _images(self) -> dict[Split, Images]:
        settings = self.settings
        if settings.data_dir is not None:
            return idx.read_images(settings.data_dir)
        numbers: dict[Split, int] = {
            "train": settings.num_train_samples or drawing.NUM_TRAIN,
            "validation": settings.num_validation_samples or drawing.NUM_VALIDATION,
        }
        return {split: drawing.draw(number, seed=_SEEDS[split]) for split, number in numbers.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the images, which a worker reads or draws again."""
        return {name: value for name, value in self.__dict__.items() if name != "_images"}

    @property
    def labels(self) -> list[str]:
        """The names of the drawn shapes, or the numbers in the files."""
        return self._labels

    def num_samples(self, split: Split) -> int:
        """Counts the images of a split."""
        return self._num_samples[split]

    @property
    def default_learning_rate(self) -> float:
        """That of Adam's authors (https://arxiv.org/abs/1412.6980), and more for the tiny network."""
        return 3e-3 if self.settings.model == "resnet-tiny" else 1e-3

    def build_model(self) -> PreTrainedModel:
        """Builds a preset."""
        import torch

        return models.build_preset(self.settings.model, self._labels).to(getattr(torch, self.settings.dtype))

    @draws_nothing
    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        """Stacks B images.

        The tensors are `pixel_values` [B, 1, height, width] from 0 to 1, with a black margin where the model needs
        larger images, in float32, and `labels` [B], int64.
        """
        import torch

        pixels, labels = (of_all[list(sample_ids)] for of_all in self._images[split])
        smallest = models.smallest_image(self.settings.model)
        missing = [max(0, smallest - size) for size in reversed(self._image_size)]
        margins = [part for total in missing for part in (total // 2, total - total // 2)]
        values = torch.from_numpy(pixels)[:, None].float() / 255
        return Batch({"pixel_values": torch.nn.functional.pad(values, margins), "labels": torch.from_numpy(labels)})

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Passes the images through the model."""
        import torch

        values = batch.tensors["pixel_values"].to(next(model.parameters()).dtype)
        # By key, since Apex turns the outputs into a plain dict where it casts the model.
        logits: torch.Tensor = model(pixel_values=values)["logits"]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def describe(self) -> dict[str, Any]:
        """Collects the origin and the counts of the data, the model, and the baseline."""
        answer, values = self._baseline()
        return {
            "data": self._origin,
            "data_digest": self._digest,
            "model": self.settings.model,
            "labels": self._labels,
            "label_counts": self._label_counts,
            "num_samples": self._num_samples,
            "image_size": list(self._image_size),
            "baseline": {"answer": answer, "metrics": values},
        }

    @property
    def _origin(self) -> str:
        return str(self.settings.data_dir or "embedded")

    def _baseline(self) -> tuple[str, dict[str, float]]:
        answer = self._labels[majority(self._label_counts["train"])]
        return answer, baseline(self._labels, self._label_counts, None)

    def overview(self) -> Overview:
        """Tabulates images and classes of both splits, and warns of classes that can hardly be learned."""
        height, width = self._image_size
        rows = [
            Row("", "", ("training", "validation")),
            Row("images", f"{height} x {width}", counts_of(self._num_samples)),
            *class_rows(self._labels, self._label_counts),
        ]
        warnings = class_warnings(self._labels, self._label_counts, unit="image", of="images")
        return Overview(
            (("data", self._origin), *aligned(rows), baseline_row(*self._baseline(), None)), tuple(warnings)
        )

    def save(self, model: PreTrainedModel, directory: Path) -> None:
        """Writes the model in Hugging Face's format, for `from_pretrained`."""
        model.save_pretrained(directory)
