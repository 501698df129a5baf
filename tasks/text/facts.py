"""Facts about texts that are worth knowing before training on them.

Arrow counts them column by column, so that no row becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.interface import Split

if TYPE_CHECKING:
    import pyarrow as pa

# At most so many labels are looked for at the ends of lines, and at most so many characters of each.
_MOST_LABELS, _LONGEST_LABEL = 100, 100


def text_facts(tables: Mapping[Split, pa.Table], labels: list[str]) -> dict[str, Any]:
    """Counts texts that are repeated, contradictory or empty, that occur in both splits, or that hold several rows.

    Two texts count as the same if they differ only in case and white space, which most vocabularies leave out.

    Args:
        tables: For each split a table with the string columns "text" and "label".
        labels: All labels.

    Returns:
        Numbers of rows, those of `duplicates`, `without_words` and `swallowed` for each split:

        - `duplicates`: the text occurs in an earlier row of the split;
        - `contradictory`: the text also occurs with another label in the training split;
        - `without_words`: the text has no letter, no digit and no symbol such as an emoji;
        - `swallowed`: the text seems to hold several rows of a file, after a quote that was not closed;
        - `in_both`: a validation text also occurs in the training split;
        - `in_both_otherwise`: it occurs there with another label.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = pa.array(labels, pa.string())
    rows: dict[Split, pa.Table] = {}
    groups: dict[Split, pa.Table] = {}
    for split, table in tables.items():
        # large_string has offsets of 64 bits: the texts of all rows together may take more than 2 GiB.
        texts = pc.utf8_lower(pc.cast(table["text"], pa.large_string()))
        texts = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, r"\s+", " "))
        rows[split] = pa.table({"text": texts, "label": pc.index_in(table["label"], value_set=names)})
        numbers = [("label", "count"), ("label", "min"), ("label", "max")]
        groups[split] = rows[split].group_by("text").aggregate(numbers)
    known = groups["train"]
    contradictory = pc.not_equal(known["label_min"], known["label_max"])
    place = pc.index_in(rows["validation"]["text"], value_set=known["text"])
    shared = pa.table({"label": rows["validation"]["label"], "place": place}).filter(pc.is_valid(place))
    theirs = known.select(["label_min", "label_max"]).take(shared["place"])
    differs = pc.or_(
        pc.not_equal(theirs["label_min"], shared["label"]), pc.not_equal(theirs["label_max"], shared["label"])
    )
    return {
        "duplicates": {split: rows[split].num_rows - groups[split].num_rows for split in rows},
        "contradictory": pc.sum(known.filter(contradictory)["label_count"]).as_py() or 0,
        "without_words": {
            split: _count(pc.invert(pc.match_substring_regex(table["text"], r"[\pL\pN\p{So}]")))
            for split, table in rows.items()
        },
        "swallowed": {split: _count(_several_rows(table["text"], labels)) for split, table in rows.items()},
        "in_both": shared.num_rows,
        "in_both_otherwise": _count(differs),
    }


def _several_rows(texts: pa.ChunkedArray, labels: list[str]) -> pa.ChunkedArray:
    """Marks texts with a line inside that ends as a row of a file does, since a quote before it was not closed."""
    import re

    import pyarrow.compute as pc

    ends = "|".join(re.escape(label[:_LONGEST_LABEL]) for label in labels[:_MOST_LABELS])
    return pc.match_substring_regex(texts, rf'[,\t]"?(?:{ends})"?\r?\n')


def _count(marked: pa.ChunkedArray) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(marked).as_py() or 0)
