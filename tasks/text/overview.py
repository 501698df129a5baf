"""What a user is shown of labelled texts before the training begins: a table of facts, and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.classes import Row, aligned, baseline_row, class_rows, class_warnings, counts_of, share_of
from tasks.interface import Overview
from tasks.text.labels import MANY_LABELS, are_numbers
from tasks.text.prepared import PreparedText


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
    rows = [
        ("data", origin),
        *aligned(_table(data, max_seq_length, positive)),
        baseline_row(*baseline, positive),
    ]
    warnings = [*_overlap_warnings(data, is_same_file), *_class_warnings(data), *_text_warnings(data)]
    return Overview(tuple(rows), tuple(warnings))


def _table(data: PreparedText, max_seq_length: int, positive: str | None) -> Iterator[Row]:
    num_rows, lengths, texts = data.num_samples, data.lengths, data.texts
    yield Row("", "", ("training", "validation"))
    yield Row("rows", "", counts_of(num_rows))
    yield from class_rows(data.labels, data.label_counts, positive)
    yield Row("tokens", "median", counts_of(_each(lengths, "p50")))
    yield Row("", "95 % up to", counts_of(_each(lengths, "p95")))
    yield Row("", "longest", counts_of(_each(lengths, "max")))
    yield Row("", f"cut to {max_seq_length}", _shares(_each(lengths, "cut"), num_rows))
    yield Row("texts", "repeated", _shares(texts["duplicates"], num_rows))
    yield Row("", "also in training", ("", share_of(texts["in_both"], num_rows["validation"])))


def _each(facts: Mapping[str, Any], key: Any) -> dict[str, int]:
    """Returns one fact of each split."""
    return {split: own[key] for split, own in facts.items()}


def _shares(numbers: Mapping[str, int], wholes: Mapping[str, int]) -> tuple[str, str]:
    return share_of(numbers["train"], wholes["train"]), share_of(numbers["validation"], wholes["validation"])


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
    warnings = []
    if len(data.labels) >= MANY_LABELS and are_numbers(data.labels):
        warnings.append(
            f"all {len(data.labels)} labels are numbers, and each becomes a class of its own; "
            "if they are amounts, group them into a few classes"
        )
    return [*warnings, *class_warnings(data.labels, data.label_counts, unit="row", of="texts")]


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
