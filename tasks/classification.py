"""What all tasks that assign one label to each sample share: the loss, the rows of an evaluation, and the metrics."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from tasks.interface import Batch, Task

if TYPE_CHECKING:
    import torch
    from torch import nn


class Classification(Task):
    """Assigns one label to each sample. The targets are the tensor `labels` [B] of a batch, int64."""

    metric_names: tuple[str, ...] = ("loss", "accuracy", "f1", "macro_f1", "roc_auc")

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """All labels in order; a target is an index into this list."""

    @property
    def positive_label(self) -> str | None:
        """Of two labels the one whose F1 is computed; None, unless a task overrides this."""
        return None

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Computes a number for each sample and label.

        Args:
            model: The model, possibly inside a backend's wrapper.
            batch: A batch of B samples on the model's device.

        Returns:
            A tensor [B, labels] in float32 or float64: under autocast some backends return half precision, and others
            do not.
        """

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sums the cross-entropy over the samples."""
        from torch import nn

        return nn.functional.cross_entropy(self.logits(model, batch), batch.tensors["labels"], reduction="sum")

    def evaluation_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Gives for each sample its loss, the number of its label, and the probability of each label."""
        import torch
        from torch import nn

        logits, labels = self.logits(model, batch), batch.tensors["labels"]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        columns = [losses[:, None].double(), labels[:, None].double(), torch.softmax(logits.double(), dim=1)]
        return torch.cat(columns, dim=1)

    @property
    def num_evaluation_columns(self) -> int:
        """Two, and one for each label."""
        return 2 + len(self.labels)

    def metrics(self, rows: torch.Tensor) -> dict[str, float | None]:
        """Computes mean loss, accuracy, macro F1 and ROC AUC and, with two labels, the F1 of the positive one.

        The definitions are those of torchmetrics (https://lightning.ai/docs/torchmetrics/stable/). Macro F1 is the mean
        of the F1 scores of the labels. With two labels, ROC AUC is that of the positive one, otherwise the mean of each
        label against the rest; it is None if a label does not occur among the samples.
        """
        from torchmetrics.functional import classification as scores

        losses, targets, probabilities = rows[:, 0], rows[:, 1].long(), rows[:, 2:]
        predicted, num_labels = probabilities.argmax(dim=1), probabilities.shape[1]
        defined, area = bool((targets.bincount(minlength=num_labels) > 0).all()), None
        macro_f1 = scores.multiclass_f1_score(predicted, targets, num_classes=num_labels, average="macro")
        metrics = {
            "loss": losses.mean().item(),
            "accuracy": (predicted == targets).double().mean().item(),
            "macro_f1": macro_f1.item(),
        }
        if self.positive_label is not None:
            number = self.labels.index(self.positive_label)
            is_positive = (targets == number).long()
            metrics["f1"] = scores.binary_f1_score((predicted == number).long(), is_positive).item()
            area = scores.binary_auroc(probabilities[:, number], is_positive) if defined else None
        elif defined:
            area = scores.multiclass_auroc(probabilities, targets, num_classes=num_labels)
        return {**metrics, "roc_auc": None if area is None else area.item()}
