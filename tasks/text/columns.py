"""The two columns of a table that hold texts and labels, checked row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.interface import TaskInputError, shown_label

if TYPE_CHECKING:
    import pyarrow as pa

NUL_REMEDY = "contains a NUL character, which texts do not; is the file damaged, or not UTF-8?"


def find_columns(present: Sequence[str], wanted: tuple[str, str], source: str) -> tuple[str, str]:
    """Finds the text and label columns, whose names may have white space around them.

    Args:
        present: The names of all columns.
        wanted: The values of --text-column and --label-column.
        source: How a message names the origin of the columns.

    Returns:
        The names of the two columns as they are written in the source.

    Raises:
        TaskInputError: One of them is missing or occurs twice.
    """
    found = []
    for column, option in zip(wanted, ("--text-column", "--label-column"), strict=True):
        exact = [name for name in present if name == column]
        same = exact or [name for name in present if name.strip() == column.strip()]
        if not same:
            names = ", ".join(shown_label(name) for name in present[:20])
            raise TaskInputError(f"{source}: there is no column {column!r}; choose {option} from {names}")
        if len(same) > 1:
            spelt = "" if exact else f" ({', '.join(map(repr, same))})"
            raise TaskInputError(f"{source}: {len(same)} columns are named {column!r}{spelt}; rename all but one")
        found += same
    return found[0], found[1]


def checked_table(table: pa.Table, columns: tuple[str, str], source: str) -> pa.Table:
    """Checks every row and turns labels into strings.

    Args:
        table: A table with both columns.
        columns: The names of the text column and the label column.
        source: How a message names the origin of the table.

    Returns:
        A table with the string columns "text" and "label", in which no value is missing.

    Raises:
        TaskInputError: There are no rows, or a row lacks its text or label, or contains an invalid value.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text_column, label_column = columns
    if table.num_rows == 0:
        raise TaskInputError(f"{source}: there are no rows")
    kind = table.schema.field(text_column).type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(value_kind) not in ("string", "large_string", "string_view"):
        raise TaskInputError(f"{source}: column {text_column!r} holds {kind}, not text; choose another --text-column")
    labels = table[label_column]
    if pa.types.is_floating(labels.type):
        labels = pc.if_else(pc.is_nan(labels), None, labels)
    try:
        labels = pc.cast(labels, pa.string())
    except pa.ArrowException as error:
        raise TaskInputError(
            f"{source}: column {label_column!r} holds {labels.type}, not labels; choose another --label-column"
        ) from error
    texts = pc.cast(table[text_column], pa.string())
    _require_values(texts, "text", source)
    _require_values(labels, "label", source)
    return pa.table({"text": texts, "label": labels})


def _require_values(values: pa.ChunkedArray, what: str, source: str) -> None:
    import pyarrow.compute as pc

    values.validate(full=True)
    missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
    first = pc.index(missing, True).as_py()
    if first >= 0:
        raise TaskInputError(f"{source}: row {first + 1} of {len(values)} has no {what}; remove or complete such rows")
    first = pc.index(pc.match_substring(values, "\0"), True).as_py()
    if first >= 0:
        raise TaskInputError(f"{source}: row {first + 1} of {len(values)}: the {what} {NUL_REMEDY}")
