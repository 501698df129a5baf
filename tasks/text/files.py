"""Local files as a source of labelled texts: csv, tsv, jsonl and parquet."""

from __future__ import annotations

import csv
import io
import json
from codecs import getincrementaldecoder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.interface import TaskInputError
from tasks.text.columns import NUL_REMEDY, checked_table, find_columns
from tasks.text.limits import MAX_ROW_BYTES, is_compressed, parquet_bytes, require_memory

if TYPE_CHECKING:
    import pyarrow as pa

# Ending of the file name -> what such a file holds.
FILE_TYPES = {
    ".csv": "comma-separated fields, the same number in every row",
    ".tsv": "tab-separated fields, the same number in every row",
    ".jsonl": "one JSON object on each line",
    ".parquet": "Apache Parquet",
}

_MAX_HEADER_BYTES = 1024 * 1024


def read_file(path: Path, *, option: str, text_column: str, label_column: str) -> pa.Table:
    """Reads one csv, tsv, jsonl or parquet file.

    Args:
        path: The file.
        option: The command-line option that names it, for messages.
        text_column: The name of the column that holds the texts.
        label_column: The name of the column that holds the labels.

    Returns:
        A table with the string columns "text" and "label", in which no value is missing.

    Raises:
        TaskInputError: The file cannot be used.
    """
    import pyarrow as pa

    source = f"{option} {path}"
    check_file(path, option=option)
    readers = {".csv": _read_delimited, ".tsv": _read_delimited, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    try:
        if path.suffix != ".parquet":
            with path.open("rb") as file:
                start = file.readline(_MAX_HEADER_BYTES)
                if is_compressed(start):
                    raise TaskInputError(f"{source}: the file is compressed; decompress it first")
                # The readers do not distinguish UTF-16, which spreadsheets write, from a damaged file.
                getincrementaldecoder("utf-8")().decode(start)
                if b"\0" in start:
                    raise TaskInputError(f"{source}: the first line {NUL_REMEDY}")
        columns = (text_column, label_column)
        return checked_table(readers[path.suffix](path, columns, source), columns, source)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if "utf8" in reason.lower() or "utf-8" in reason.lower():
            reason = "it is not UTF-8; convert it, for example with iconv"
        raise TaskInputError(f"{source}: cannot be read as {FILE_TYPES[path.suffix]}: {reason[:300]}") from error


def check_file(path: Path, *, option: str) -> None:
    """Checks what can be seen without reading the file.

    Args:
        path: The file.
        option: The command-line option that names it, for messages.

    Raises:
        TaskInputError: There is no such file, or it is empty, too large, or of another kind.
    """
    if not path.exists():
        raise TaskInputError(f"{option} {path}: there is no such file; name one that exists")
    if not path.is_file():
        raise TaskInputError(f"{option} {path}: this is not a file; name a file ({', '.join(FILE_TYPES)})")
    if path.suffix not in FILE_TYPES:
        raise TaskInputError(f"{option} {path}: the name must end in one of {', '.join(FILE_TYPES)}")
    if path.stat().st_size == 0:
        raise TaskInputError(f"{option} {path}: the file is empty; it must hold a row for each text")
    require_memory(path.stat().st_size, f"{option} {path}")


def _read_delimited(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as arrow

    delimiter = "\t" if path.suffix == ".tsv" else ","
    header = _read_header(path, delimiter)
    if len(header) == 1 and (other := next((one for one in ";\t|," if one != delimiter and one in header[0]), None)):
        raise TaskInputError(
            f"{source}: the first line, {header[0][:80]!r}, has no {delimiter!r} but {other!r}; "
            f"the file must hold {FILE_TYPES[path.suffix]}"
        )
    found = find_columns(header, columns, source) if header else columns
    parse = arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = arrow.ConvertOptions(include_columns=list(found), column_types={name: pa.string() for name in found})
    size = path.stat().st_size
    # A row must fit into a block of the reader, which is slow and takes much memory with large blocks.
    block_sizes = sorted({min(block_size, size + 1) for block_size in (2**20, MAX_ROW_BYTES)})
    while True:
        read = arrow.ReadOptions(block_size=block_sizes.pop(0))
        try:
            table = arrow.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
            return table.rename_columns(list(columns))
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or not block_sizes:
                _name_bad_row(path, delimiter, source)
                if "straddling" in str(error):
                    raise TaskInputError(
                        f"{source}: a row is longer than {MAX_ROW_BYTES >> 20} MiB; shorten it, or close its quote"
                    ) from error
                raise


def _read_header(path: Path, delimiter: str) -> list[str]:
    """Returns the names of the columns; none if the header cannot be read, which the reader then reports."""
    with path.open("rb") as file:
        start = file.read(_MAX_HEADER_BYTES).decode("utf-8-sig", errors="ignore")
    try:
        rows = csv.reader(io.StringIO(start, newline=""), delimiter=delimiter)
        return next((row for row in rows if row), [])
    except csv.Error:
        return []


def _name_bad_row(path: Path, delimiter: str, source: str) -> None:
    """Raises a TaskInputError that names the first row whose number of fields is not that of the header."""
    limit = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # A longer line is cut, so that the csv module refuses a field of it as too large.
            rows = csv.reader(iter(lambda: file.readline(MAX_ROW_BYTES + 2), ""), delimiter=delimiter)
            header = next((row for row in rows if row), [])
            number, began = 0, rows.line_num + 1
            for row in rows:
                number += bool(row)
                if row and len(row) != len(header):
                    lines, quote = f"line {began}", ""
                    if rows.line_num > began:
                        lines, quote = f"lines {began} to {rows.line_num}", "; is a quote in it not closed?"
                    raise TaskInputError(
                        f"{source}: cannot be read as {FILE_TYPES[path.suffix]}: row {number} ({lines}) has "
                        f"{len(row)} field(s), but the header has {len(header)}{quote}; correct the row"
                    )
                began = rows.line_num + 1
    except (csv.Error, UnicodeDecodeError):
        return  # the reader reports the file in its own words
    finally:
        csv.field_size_limit(limit)


def _read_jsonl(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    """Reads with Python's own parser, since that of Arrow 26 crashes on a line that is null."""
    import pyarrow as pa

    values: dict[str, list[Any]] = {column: [] for column in columns}
    present: dict[str, None] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES), b""), start=1):
            if len(line) == MAX_ROW_BYTES:
                raise _not_json(source, number, f"it is longer than {MAX_ROW_BYTES >> 20} MiB")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            try:
                row = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
            except (ValueError, RecursionError) as error:
                raise _not_json(source, number, str(error)) from error
            if not isinstance(row, dict):
                raise _not_json(source, number, f"it is a {type(row).__name__}, not an object")
            present |= dict.fromkeys(row)
            for column in columns:
                values[column].append(row.get(column))
    if present and (found := find_columns(list(present), columns, source)) != columns:
        return _read_jsonl(path, found, source).rename_columns(list(columns))
    table = {}
    for column in columns:
        try:
            table[column] = pa.array(values[column])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise TaskInputError(
                f"{source}: column {column!r} mixes types, or holds text that is not valid Unicode ({reason})"
            ) from error
    return pa.table(table)


def _not_json(source: str, row: int, reason: str) -> TaskInputError:
    return TaskInputError(f"{source}: cannot be read as {FILE_TYPES['.jsonl']}: row {row}: {reason[:300]}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in row if names.count(name) > 1)!r} occurs twice")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _read_parquet(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    from pyarrow import parquet

    found = find_columns(parquet.read_schema(path).names, columns, source)
    require_memory(parquet_bytes([path], found), source)
    return parquet.read_table(path, columns=list(found)).rename_columns(list(columns))
