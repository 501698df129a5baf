"""The classes of labelled samples: a baseline, the table that a user is shown, and what is worth a warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tasks.interface import metric_title, shown_label

# If there are more classes than these, only the largest and the smallest are shown.
_MOST_CLASSES, _LARGEST, _SMALLEST = 12, 6, 3
# A class with fewer training samples can hardly be learned, let alone judged.
_FEW_SAMPLES = 5
_NUM_NAMED = 5


class Row(NamedTuple):
    """A row of an overview.

    Attributes:
        heading: What it is about; empty continues the row above.
        name: What its numbers are.
        cells: The numbers of the training and of the validation split.
        mark: A remark behind them.
    """

    heading: str
    name: str
    cells: tuple[str, str]
    mark: str = ""


def aligned(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Aligns rows.

    Args:
        rows: At least one row.

    Returns:
        For each row its heading and a line of text, as an `Overview` has them.
    """
    rows = list(rows)
    names = max(len(row.name) for row in rows)
    widths = [max(len(row.cells[column]) for row in rows) for column in (0, 1)]
    lines = []
    for row in rows:
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(row.cells, widths, strict=True))
        lines.append((row.heading, f"{row.name:{names}}  {cells}  {row.mark}".rstrip()))
    return lines


def counts_of(numbers: Mapping[str, int]) -> tuple[str, str]:
    """Writes a number of each split."""
    return f"{numbers['train']:,}", f"{numbers['validation']:,}"


def share_of(part: int, whole: int) -> str:
    """Writes a part of a number, and what share of it that is."""
    return f"{part:,} {100 * part / whole:5.1f} %"


def class_rows(labels: Sequence[str], counts: Mapping[str, list[int]], positive: str | None = None) -> Iterator[Row]:
    """Yields a row for each class, from the largest to the smallest; if there are many, not for those between.

    Args:
        labels: All labels in order.
        counts: For each split the number of samples of each label, in this order.
        positive: The positive label, if there is one.
    """
    heading = f"{len(labels)} classes"
    for label in _shown(counts["train"]):
        if label is None:
            yield Row("", f"... {len(labels) - _LARGEST - _SMALLEST} more", ("", ""))
            continue
        cells = [share_of(counts[split][label], sum(counts[split])) for split in ("train", "validation")]
        mark = "positive" if labels[label] == positive else ""
        yield Row(heading, shown_label(labels[label]), (cells[0], cells[1]), mark)
        heading = ""


def _shown(counts: list[int]) -> list[int | None]:
    """Returns the classes by size; if there are many, the largest and the smallest, with None for those between."""
    in_order: list[int | None] = [*sorted(range(len(counts)), key=lambda label: -counts[label])]
    return [*in_order[:_LARGEST], None, *in_order[-_SMALLEST:]] if len(counts) > _MOST_CLASSES else in_order


def class_warnings(labels: Sequence[str], counts: Mapping[str, list[int]], *, unit: str, of: str) -> list[str]:
    """Warns of classes that can hardly be learned or judged.

    Args:
        labels: All labels in order.
        counts: For each split the number of samples of each label, in this order.
        unit: What one sample is called in the data: "row".
        of: What the samples are: "texts".

    Returns:
        A sentence each.
    """
    warnings = []
    few = [label for label, count in zip(labels, counts["train"], strict=True) if count < _FEW_SAMPLES]
    if few:
        warnings.append(f"{_named(few)} fewer than {_FEW_SAMPLES} training {unit}s: too few to learn from")
    absent = [label for label, count in zip(labels, counts["validation"], strict=True) if count == 0]
    if absent:
        warnings.append(f"{_named(absent)} no validation {unit}: the metrics say nothing about such {of}")
    return warnings


def baseline_row(answer: str, metrics: Mapping[str, float], positive: str | None) -> tuple[str, str]:
    """Writes what always giving the same answer leads to, as a row of an `Overview`."""
    values = "  ".join(f"{metric_title(name, positive)} {value:.4f}" for name, value in metrics.items())
    return "baseline", f"always {shown_label(answer)!r} gives  {values}"


def _named(labels: list[str]) -> str:
    shown = ", ".join(map(shown_label, labels[:_NUM_NAMED]))
    if len(labels) == 1:
        return f"the class {shown} has"
    return f"{len(labels)} classes ({shown}{', ...' if len(labels) > _NUM_NAMED else ''}) have"


def baseline(labels: list[str], counts: Mapping[str, list[int]], positive: str | None) -> dict[str, float]:
    """Computes how good it is to always answer the label that is most frequent in training.

    With h hits among n validation samples, precision is h / n and recall is 1, so that F1 is 2 h / (n + h) for the
    answer and 0 for every other label.

    Args:
        labels: All labels in order.
        counts: For each split the number of samples of each label, in this order.
        positive: The positive label, if there is one.

    Returns:
        `accuracy` and `macro_f1` on the validation samples, and `f1` if there is a positive label.
    """
    held_out, answer = counts["validation"], majority(counts["train"])
    hits, num_rows = held_out[answer], sum(held_out)
    f1 = 2 * hits / (num_rows + hits)
    # As torchmetrics does, the mean leaves out labels that are neither a target nor an answer.
    num_occurring = sum(bool(count) or label == answer for label, count in enumerate(held_out))
    metrics = {"accuracy": hits / num_rows}
    if positive is not None:
        metrics["f1"] = f1 if labels[answer] == positive else 0.0
    return metrics | {"macro_f1": f1 / num_occurring}


def majority(num_rows: list[int]) -> int:
    """Finds the most frequent label.

    Args:
        num_rows: The number of rows of each label.

    Returns:
        An index into `num_rows`; the first one if several labels are equally frequent.
    """
    return num_rows.index(max(num_rows))
