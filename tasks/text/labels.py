"""The labels of a dataset: which of them are refused, how they are numbered, and which one is positive."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from tasks.interface import Split, TaskInputError, shown_label

if TYPE_CHECKING:
    import pyarrow as pa

# How programs and people write that a value is missing, in lower case.
MISSING = frozenset({"nan", "null", "none", "n/a", "#n/a", "na", "<na>", "nat", "-", "--", "?"})
# If there are at least so many labels with fewer than two rows each on average, they name rows, not classes.
MANY_LABELS = 20

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII)
_NUM_NAMED = 5
_MOST_DIGITS = 1000


def count_labels(tables: Mapping[Split, pa.Table]) -> dict[Split, dict[str, int]]:
    """Counts the rows of each label.

    Args:
        tables: For each split a table with the string column "label".

    Returns:
        For each split the number of rows of each label that occurs there.
    """
    import pyarrow.compute as pc

    counted = {split: pc.value_counts(table["label"]) for split, table in tables.items()}
    return {
        split: dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))
        for split, counts in counted.items()
    }


def label_names(
    counts: Mapping[Split, Mapping[str, int]], sources: Mapping[Split, str], *, keep_labels: bool
) -> list[str]:
    """Puts the labels of the training split in order.

    Args:
        counts: For each split the number of rows of each label.
        sources: How a message names the origin of each split.
        keep_labels: Whether labels may look alike, look like missing values, or be many for so few rows.

    Returns:
        The labels by value if all are whole numbers, otherwise by name; a sample's target is an index into this list.

    Raises:
        TaskInputError: The labels cannot be learned, or are probably not those that the user means.
    """
    labels, num_rows = set(counts["train"]), sum(counts["train"].values())
    if len(labels) < 2:
        raise TaskInputError(
            f"{sources['train']}: all training rows have the label {labels.pop()!r}; at least two labels are needed"
        )
    if not keep_labels and len(labels) >= MANY_LABELS and 2 * len(labels) > num_rows:
        kind = "numbers to be predicted, not classes" if are_numbers(labels) else "names of rows, not of classes"
        raise TaskInputError(
            f"{sources['train']}: {len(labels)} different labels in {num_rows} training rows look like {kind}; "
            "choose another --label-column, group the values into classes, or add --keep-labels if all are classes"
        )
    if not keep_labels:
        _refuse_look_alikes(counts, sources)
        _refuse_missing(counts, sources)
    unseen = set(counts["validation"]) - labels
    if unseen:
        raise TaskInputError(
            f"{sources['validation']}: the validation label {min(unseen)!r} does not occur among the training "
            f"labels ({', '.join(sorted(labels)[:10])}); remove such rows, or add training rows with this label"
        )
    # Python refuses to read numbers of more than 4300 digits.
    whole_numbers = all(label.removeprefix("-").isdecimal() and len(label) <= _MOST_DIGITS for label in labels)
    return sorted(labels, key=lambda label: (int(label), label)) if whole_numbers else sorted(labels)


def _refuse_look_alikes(counts: Mapping[Split, Mapping[str, int]], sources: Mapping[Split, str]) -> None:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for label in sorted(counts["train"].keys() | counts["validation"].keys()):
        groups[_plain(label)].append(label)
    alike = [labels for labels in groups.values() if len(labels) > 1]
    if alike:
        others = f" (and {len(alike) - 1} more of the kind)" if len(alike) > 1 else ""
        raise TaskInputError(
            f"{_origin(alike[0], counts, sources)}: the labels {_counted(alike[0], counts)}{others} differ only in "
            "white space, case, or the spelling of a number or letter; give them one spelling, or add --keep-labels "
            "if they are different classes"
        )


def _refuse_missing(counts: Mapping[Split, Mapping[str, int]], sources: Mapping[Split, str]) -> None:
    labels = sorted(counts["train"].keys() | counts["validation"].keys())
    missing = [label for label in labels if label.strip().lower() in MISSING]
    if missing:
        raise TaskInputError(
            f"{_origin(missing, counts, sources)}: {_counted(missing, counts)} among the labels seems to stand for a "
            "missing value; remove or complete such rows, or add --keep-labels if it is the name of a class"
        )


def _origin(labels: list[str], counts: Mapping[Split, Mapping[str, int]], sources: Mapping[Split, str]) -> str:
    return sources["train" if all(label in counts["train"] for label in labels) else "validation"]


def _counted(labels: list[str], counts: Mapping[Split, Mapping[str, int]]) -> str:
    # Escapes tell apart what looks the same on a terminal.
    look_same = len({unicodedata.normalize("NFC", label) for label in labels}) < len(labels)
    named = []
    for label in labels:
        num_rows = sum(split.get(label, 0) for split in counts.values())
        named.append(f"{ascii(label) if look_same else repr(label)} ({num_rows} {'row' if num_rows == 1 else 'rows'})")
    return ", ".join(named[:_NUM_NAMED]) + (f" and {len(named) - _NUM_NAMED} more" if len(named) > _NUM_NAMED else "")


def _plain(label: str) -> str:
    """Reduces a label to what is left without white space, invisible characters, case, and variants of spelling.

    Letters follow NFKC_Casefold of the Unicode Standard, section 3.13 (https://www.unicode.org/versions/latest/);
    a number becomes its significant digits and an exponent.
    """
    text = unicodedata.normalize("NFKC", label)
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = " ".join(text.casefold().split())
    # Folding the case may undo the normal form.
    text = unicodedata.normalize("NFKC", text)
    if _NUMBER.fullmatch(text) is None:
        return text
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:  # the exponent is too large
        return text
    whole = "".join(map(str, digits)).lstrip("0")
    shortest = whole.rstrip("0")
    if not shortest:
        return "0"
    return f"{'-' * sign}{shortest}e{int(exponent) + len(whole) - len(shortest)}"


def are_numbers(labels: set[str] | list[str]) -> bool:
    """Tells whether every label is a number.

    Args:
        labels: Labels as they are written in the data.

    Returns:
        True if each is a decimal number, with or without sign, fraction and exponent.
    """
    return all(_NUMBER.fullmatch(label.strip().lower()) for label in labels)


def positive_label(labels: list[str], num_rows: list[int], *, asked: str | None) -> str | None:
    """Chooses the label whose F1 is reported.

    Of two numbers it is the larger one, of true and false it is true. Otherwise it is the rarer label of the training
    rows, or the second in order if both are equally frequent.

    Args:
        labels: All labels in order.
        num_rows: The number of training rows of each label.
        asked: The value of --positive-label, if it is given.

    Returns:
        One of the labels; None if there are more than two.

    Raises:
        TaskInputError: `asked` is not one of the labels, or there are more than two.
    """
    if asked is not None and asked not in labels:
        known = ", ".join(map(shown_label, labels[:10])) + (", ..." if len(labels) > 10 else "")
        raise TaskInputError(f"--positive-label {asked}: there is no such label; choose one of {known}")
    if len(labels) > 2:
        if asked is not None:
            raise TaskInputError(
                f"--positive-label {asked}: there are {len(labels)} labels, but a positive label needs exactly two; "
                "leave the option out and use macro_f1, the mean over all labels"
            )
        return None
    if asked is not None:
        return asked
    if are_numbers(labels):
        return max(labels, key=lambda label: float(label.strip()))
    if {label.lower() for label in labels} == {"true", "false"}:
        return next(label for label in labels if label.lower() == "true")
    return labels[0] if num_rows[0] < num_rows[1] else labels[1]
