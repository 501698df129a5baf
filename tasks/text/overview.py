"""What a user is shown of labelled texts before the training begins: a table of facts, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tasks.interface import Overview, metric_title, shown_label
from tasks.text.labels import MANY_LABELS, are_numbers
from tasks.text.prepared import PreparedText

# If there are more classes than these, only the largest and the smallest are shown.
_MOST_CLASSES, _LARGEST, _SMALLEST = 12, 6, 3
# A class with fewer training rows can hardly be learned, let alone judged.
_FEW_ROWS = 5
_NUM_NAMED = 5


class _Row(NamedTuple):
    heading: str
    name: str
    cells: tuple[str, str]
    mark: str = ""


def text_overview(
    data: PreparedText,
    *,
    origin: str,
    max_seq_length: int,
    positive: str | None,
    baseline: tuple[str, dict[str, float]],
    is_same_file: bool,
) -> Overview:
    """Summarises the data, and warns of what looks like a mistake.

    Args:
        data: The prepared texts.
        origin: Where they come from.
        max_seq_length: The number of tokens to which they were cut.
        positive: The positive class, if there are two classes.
        baseline: The answer of a model without any skill, and its metrics on the validation rows.
        is_same_file: Whether training and validation are read from one file.

    Returns:
        The rows of a table, aligned, and the warnings.
    """
    answer, metrics = baseline
    values = "  ".join(f"{metric_title(name, positive)} {value:.4f}" for name, value in metrics.items())
    rows = [
        ("data", origin),
        *_aligned(_table(data, max_seq_length, positive)),
        ("baseline", f"always {shown_label(answer)!r} gives  {values}"),
    ]
    warnings = [*_overlap_warnings(data, is_same_file), *_class_warnings(data), *_text_warnings(data)]
    return Overview(tuple(rows), tuple(warnings))


def _table(data: PreparedText, max_seq_length: int, positive: str | None) -> Iterator[_Row]:
    num_rows, lengths, texts = data.num_samples, data.lengths, data.texts
    yield _Row("", "", ("training", "validation"))
    yield _Row("rows", "", _counts(num_rows))
    heading = f"{len(data.labels)} classes"
    for label in _shown_classes(data):
        if label is None:
            yield _Row("", f"... {len(data.labels) - _LARGEST - _SMALLEST} more", ("", ""))
            continue
        mark = "positive" if data.labels[label] == positive else ""
        yield _Row(heading, shown_label(data.labels[label]), _shares(_each(data.label_counts, label), num_rows), mark)
        heading = ""
    yield _Row("tokens", "median", _counts(_each(lengths, "p50")))
    yield _Row("", "95 % up to", _counts(_each(lengths, "p95")))
    yield _Row("", "longest", _counts(_each(lengths, "max")))
    yield _Row("", f"cut to {max_seq_length}", _shares(_each(lengths, "cut"), num_rows))
    yield _Row("texts", "repeated", _shares(texts["duplicates"], num_rows))
    yield _Row("", "also in training", ("", _share(texts["in_both"], num_rows["validation"])))


def _each(facts: Mapping[str, Any], key: Any) -> dict[str, int]:
    """Returns one fact of each split."""
    return {split: own[key] for split, own in facts.items()}


def _counts(numbers: Mapping[str, int]) -> tuple[str, str]:
    return f"{numbers['train']:,}", f"{numbers['validation']:,}"


def _shares(numbers: Mapping[str, int], wholes: Mapping[str, int]) -> tuple[str, str]:
    return _share(numbers["train"], wholes["train"]), _share(numbers["validation"], wholes["validation"])


def _share(part: int, whole: int) -> str:
    return f"{part:,} {100 * part / whole:5.1f} %"


def _shown_classes(data: PreparedText) -> list[int | None]:
    """Returns the classes by size; if there are many, the largest and the smallest, with None for those between."""
    rows = data.label_counts["train"]
    in_order: list[int | None] = [*sorted(range(len(rows)), key=lambda label: -rows[label])]
    return [*in_order[:_LARGEST], None, *in_order[-_SMALLEST:]] if len(rows) > _MOST_CLASSES else in_order


def _aligned(rows: Iterable[_Row]) -> list[tuple[str, str]]:
    rows = list(rows)
    names = max(len(row.name) for row in rows)
    widths = [max(len(row.cells[column]) for row in rows) for column in (0, 1)]
    lines = []
    for row in rows:
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(row.cells, widths, strict=True))
        lines.append((row.heading, f"{row.name:{names}}  {cells}  {row.mark}".rstrip()))
    return lines


def _overlap_warnings(data: PreparedText, is_same_file: bool) -> list[str]:
    texts, num_validation = data.texts, data.num_samples["validation"]
    if is_same_file:
        return [
            "training and validation are the same file: the metrics will only describe rows that the model was "
            "trained on; keep some rows apart for --validation-file"
        ]
    warnings = []
    if texts["in_both"]:
        warnings.append(
            f"{texts['in_both']:,} of {num_validation:,} validation texts also occur in training: "
            "the metrics will be better than on new texts"
        )
    if texts["in_both_otherwise"]:
        warnings.append(f"{texts['in_both_otherwise']:,} of these have another label there")
    return warnings


def _class_warnings(data: PreparedText) -> list[str]:
    train, held_out = data.label_counts["train"], data.label_counts["validation"]
    warnings = []
    if len(data.labels) >= MANY_LABELS and are_numbers(data.labels):
        warnings.append(
            f"all {len(data.labels)} labels are numbers, and each becomes a class of its own; "
            "if they are amounts, group them into a few classes"
        )
    few = [label for label, count in zip(data.labels, train, strict=True) if count < _FEW_ROWS]
    if few:
        warnings.append(f"{_named(few)} fewer than {_FEW_ROWS} training rows: too few to learn from")
    absent = [label for label, count in zip(data.labels, held_out, strict=True) if count == 0]
    if absent:
        warnings.append(f"{_named(absent)} no validation row: the metrics say nothing about such texts")
    return warnings


def _text_warnings(data: PreparedText) -> list[str]:
    texts = data.texts
    warnings = []
    if texts["contradictory"]:
        warnings.append(f"{texts['contradictory']:,} training rows have the same text as a row with another label")
    for split, name in (("train", "training"), ("validation", "validation")):
        if empty := texts["without_words"][split]:
            warnings.append(f"{empty:,} {name} texts hold no letter, no digit and no symbol such as an emoji")
        if swallowed := texts["swallowed"][split]:
            warnings.append(
                f"{swallowed:,} {name} texts hold a line that ends in a label, as if they were several rows of the "
                "file: is a quote in it not closed?"
            )
    return warnings


def _named(labels: list[str]) -> str:
    shown = ", ".join(map(shown_label, labels[:_NUM_NAMED]))
    if len(labels) == 1:
        return f"the class {shown} has"
    return f"{len(labels)} classes ({shown}{', ...' if len(labels) > _NUM_NAMED else ''}) have"
