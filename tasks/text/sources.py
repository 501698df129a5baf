"""Where labelled texts come from: the embedded grammar, local files, or a data set of the hub.

Every source ends as an Arrow table with the string columns "text" and "label", checked row by row.
"""

from __future__ import annotations

import csv
import io
import json
import os
from codecs import getincrementaldecoder
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.interface import Split, TaskInputError, shown_label

if TYPE_CHECKING:
    import pyarrow as pa

# File name ending -> what such a file holds.
FILE_TYPES = {
    ".csv": "comma-separated fields, equally many in each row",
    ".tsv": "tab-separated fields, equally many in each row",
    ".jsonl": "one JSON object in each line",
    ".parquet": "Apache Parquet",
}
NUM_EMBEDDED = {"train": 8000, "validation": 1000}

# What a row may take: more is no row.
_MAX_ROW_BYTES = 64 * 1024 * 1024
_MAX_HEADER_BYTES = 1024 * 1024
_NUL_REMEDY = "holds a NUL character, which no text has; is the file damaged, or not UTF-8?"
# An offset, or a number.
_BYTES_OF_A_VALUE = 8
# What is unpacked before it is read, to a size that nobody knows before, by its first bytes: gzip, zip, bzip2, xz,
# Zstandard, LZ4, 7z, rar.
_PACKED = (
    b"\x1f\x8b",
    b"PK\x03\x04",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"7z\xbc\xaf",
    b"Rar!",
)


def embedded_tables() -> dict[Split, pa.Table]:
    """Generates the embedded reviews; no text occurs in both splits."""
    import pyarrow as pa

    from tasks.text.grammar import generate

    rows = pa.Table.from_pylist(generate(NUM_EMBEDDED["train"] + NUM_EMBEDDED["validation"], seed=0))
    return {"train": rows.slice(0, NUM_EMBEDDED["train"]), "validation": rows.slice(NUM_EMBEDDED["train"])}


def read_file(path: Path, *, option: str, text_column: str, label_column: str) -> pa.Table:
    """Reads one csv, tsv, jsonl or parquet file.

    Raises:
        TaskInputError: The file, given by the command-line `option`, cannot be used.
    """
    import pyarrow as pa

    source = f"{option} {path}"
    check_file(path, option=option)
    readers = {".csv": _read_delimited, ".tsv": _read_delimited, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    try:
        if path.suffix != ".parquet":
            with path.open("rb") as file:
                start = file.readline(_MAX_HEADER_BYTES)
                if start.startswith(_PACKED):
                    raise TaskInputError(f"{source}: unpack it first; what is packed is not opened")
                # The readers do not tell UTF-16, as spreadsheets save, from damage.
                getincrementaldecoder("utf-8")().decode(start)
                if b"\0" in start:
                    raise TaskInputError(f"{source}: the first line {_NUL_REMEDY}")
        table = readers[path.suffix](path, (text_column, label_column), source)
        return _checked(table, text_column, label_column, source)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if "utf8" in reason.lower() or "utf-8" in reason.lower():
            reason = "it is not UTF-8; convert it, for example with iconv"
        raise TaskInputError(f"{source}: cannot be read as {FILE_TYPES[path.suffix]}: {reason[:300]}") from error


def check_file(path: Path, *, option: str) -> None:
    """Checks what can be seen without reading the file."""
    if not path.exists():
        raise TaskInputError(f"{option} {path}: there is no such file")
    if not path.is_file():
        raise TaskInputError(f"{option} {path}: this is not a file; name one ({', '.join(FILE_TYPES)})")
    if path.suffix not in FILE_TYPES:
        raise TaskInputError(f"{option} {path}: the ending must be one of {', '.join(FILE_TYPES)}")
    if path.stat().st_size == 0:
        raise TaskInputError(f"{option} {path}: the file is empty; it needs a row for each text")
    _require_room(path.stat().st_size, f"{option} {path}")


def _require_room(num_bytes: int, source: str) -> None:
    """Refuses what would fill the memory: texts are held in it, and tokenised there."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    if num_bytes > room:
        raise TaskInputError(
            f"{source}: {num_bytes / 2**30:.1f} GiB of texts are more than a quarter of this machine's memory; "
            "use a part of them"
        )


def hub_tables(name: str, *, text_column: str, label_column: str) -> dict[Split, pa.Table]:
    """Loads a data set through the `datasets` library: a hub name, name:config, or a local directory.

    Raises:
        TaskInputError: It cannot be loaded or lacks a split or column.
    """
    import datasets
    import pyarrow as pa

    # What it has to say is in the error that it raises.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path, _, config = name.partition(":")
    if Path(path).is_dir():
        try:
            _check_directory(Path(path), f"--dataset {name}")
        except (pa.ArrowException, OSError) as error:
            raise TaskInputError(f"--dataset {name}: cannot be read ({' '.join(str(error).split())[:300]})") from error
    try:
        splits: Any = datasets.load_dataset(path, config or None)
    except Exception as error:  # hub, cache and format errors share no base class
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise TaskInputError(
            f"--dataset {name}: cannot be loaded ({reason}); name a data set of the hub or a directory, "
            "or use --train-file and --validation-file"
        ) from error
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    if "train" not in splits or held_out is None:
        raise TaskInputError(
            f"--dataset {name}: needs the splits train and validation (or test), has only {', '.join(splits)}"
        )
    tables: dict[Split, pa.Table] = {}
    for split, wanted in (("train", "train"), ("validation", held_out)):
        dataset = splits[wanted]
        source = f"--dataset {name} ({wanted})"
        columns = (text_column, label_column)
        found = _find_columns(dataset.column_names, columns, source)
        labels = dataset.features[found[1]]
        table = dataset.select_columns(list(found)).with_format("arrow")[:].rename_columns(list(columns))
        if isinstance(labels, datasets.ClassLabel):
            # -1 is how the hub's data sets mark a withheld label.
            numbers = table[label_column].to_pylist()
            names = pa.array(
                [None if number in (None, -1) else labels.int2str(number) for number in numbers], pa.string()
            )
            table = pa.table({text_column: table[text_column], label_column: names})
        tables["train" if split == "train" else "validation"] = _checked(table, text_column, label_column, source)
    return tables


def _check_directory(directory: Path, source: str) -> None:
    """Refuses what would be unpacked, fetched, or larger than the memory; names tell none of that."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    for file in files:
        with file.open("rb") as content:
            first = content.read(300)
        if first.startswith(_PACKED) or first[257:262] == b"ustar":
            raise TaskInputError(f"{source}: unpack {file.name} first; what is packed is not opened")
        if file.name == "README.md" and "data_files" in (text := file.read_text(errors="replace")) and "://" in text:
            raise TaskInputError(
                f"{source}: its README.md names data files elsewhere; fetch them, and remove the entry"
            )
    _require_room(sum(file.stat().st_size for file in files), source)
    _require_room(_unpacked_bytes([file for file in files if file.suffix == ".parquet"], None), source)


def _read_delimited(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as arrow

    delimiter = "\t" if path.suffix == ".tsv" else ","
    header = _read_header(path, delimiter)
    if len(header) == 1 and (other := next((one for one in ";\t|," if one != delimiter and one in header[0]), None)):
        raise TaskInputError(
            f"{source}: the first line, {header[0][:80]!r}, has no {delimiter!r} but {other!r}; "
            f"write a file of {FILE_TYPES[path.suffix]}"
        )
    found = _find_columns(header, columns, source) if header else columns
    parse = arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = arrow.ConvertOptions(include_columns=list(found), column_types={name: pa.string() for name in found})
    size = path.stat().st_size
    # A row must fit a block of the reader, which becomes slow and hungry with large ones.
    block_sizes = [block_size for block_size in (2**20, _MAX_ROW_BYTES) if block_size < size] or [size + 1]
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
                        f"{source}: a row is longer than {_MAX_ROW_BYTES} bytes; shorten it, or close its quote"
                    ) from error
                raise


def _read_header(path: Path, delimiter: str) -> list[str]:
    """Returns the names of the columns; none where the reader will say what is wrong with the file."""
    with path.open("rb") as file:
        start = file.read(_MAX_HEADER_BYTES).decode("utf-8-sig", errors="ignore")
    try:
        rows = csv.reader(io.StringIO(start, newline=""), delimiter=delimiter)
        return next((row for row in rows if row), [])
    except csv.Error:
        return []


def _name_bad_row(path: Path, delimiter: str, source: str) -> None:
    """Raises TaskInputError that names the first row with another number of fields than the header has."""
    limit = csv.field_size_limit(_MAX_ROW_BYTES)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Longer lines are cut, and then refused as fields that are too large.
            rows = csv.reader(iter(lambda: file.readline(_MAX_ROW_BYTES + 2), ""), delimiter=delimiter)
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
                        f"{len(row)} field(s), where the header has {len(header)}{quote}"
                    )
                began = rows.line_num + 1
    except (csv.Error, UnicodeDecodeError):
        return  # the reader's own words must do
    finally:
        csv.field_size_limit(limit)


def _read_jsonl(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    """Reads with Python's own parser: that of Arrow 26 crashes on a line that is null."""
    import pyarrow as pa

    values: dict[str, list[Any]] = {column: [] for column in columns}
    present: dict[str, None] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_ROW_BYTES), b""), start=1):
            if len(line) == _MAX_ROW_BYTES:
                raise _no_json(source, number, f"it is longer than {_MAX_ROW_BYTES} bytes")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            try:
                row = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
            except (ValueError, RecursionError) as error:
                raise _no_json(source, number, str(error)) from error
            if not isinstance(row, dict):
                raise _no_json(source, number, f"it is a {type(row).__name__}")
            present |= dict.fromkeys(row)
            for column in columns:
                values[column].append(row.get(column))
    if present and (found := _find_columns(list(present), columns, source)) != columns:
        return _read_jsonl(path, found, source).rename_columns(list(columns))
    table = {}
    for column in columns:
        try:
            table[column] = pa.array(values[column])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise TaskInputError(
                f"{source}: column {column!r} holds values that do not go together, or no text ({reason})"
            ) from error
    return pa.table(table)


def _no_json(source: str, row: int, reason: str) -> TaskInputError:
    return TaskInputError(f"{source}: cannot be read as {FILE_TYPES['.jsonl']}: row {row}: {reason[:300]}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in row if names.count(name) > 1)!r} occurs twice")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _read_parquet(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    from pyarrow import parquet

    found = _find_columns(parquet.read_schema(path).names, columns, source)
    _require_room(_unpacked_bytes([path], found), source)
    return parquet.read_table(path, columns=list(found)).rename_columns(list(columns))


def _unpacked_bytes(paths: Iterable[Path], columns: tuple[str, str] | None) -> int:
    """What columns (None: all) of parquet files take in memory; a dictionary may repeat one text a billion times."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import parquet

    total = 0
    for path in paths:
        file = parquet.ParquetFile(path)
        facts = file.metadata
        wanted = [field for field in file.schema_arrow if columns is None or field.name in columns]
        total += sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))
        total += _BYTES_OF_A_VALUE * facts.num_rows * len(wanted)
        _require_room(total, str(path))
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        texts = [field.name for field in wanted if any(is_kind(field.type) for is_kind in kinds)]
        file = parquet.ParquetFile(path, read_dictionary=texts)
        for batch in file.iter_batches(columns=texts) if texts else ():
            for column in batch.columns:
                if pa.types.is_dictionary(column.type):
                    lengths = pc.binary_length(column.dictionary)
                    total += pc.sum(pc.take(lengths, column.indices)).as_py() or 0
            _require_room(total, str(path))
    return total


def _find_columns(present: list[str], wanted: tuple[str, str], source: str) -> tuple[str, str]:
    """Returns the two columns' names as the source has them, where they may have blanks around them."""
    found = []
    for column, option in zip(wanted, ("--text-column", "--label-column"), strict=True):
        exact = [name for name in present if name == column]
        same = exact or [name for name in present if name.strip() == column.strip()]
        if not same:
            names = ", ".join(shown_label(name) for name in present[:20])
            raise TaskInputError(f"{source}: there is no column {column!r}; choose {option} from {names}")
        if len(same) > 1:
            spelt = "" if exact else f" ({', '.join(map(repr, same))})"
            raise TaskInputError(f"{source}: there are {len(same)} columns {column!r}{spelt}; rename all but one")
        found += same
    return found[0], found[1]


def _checked(table: pa.Table, text_column: str, label_column: str, source: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

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
    for what, values in (("text", texts), ("label", labels)):
        values.validate(full=True)
        missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
        first = pc.index(missing, True).as_py()
        if first >= 0:
            raise TaskInputError(
                f"{source}: row {first + 1} of {table.num_rows} has no {what}; remove or complete such rows"
            )
        first = pc.index(pc.match_substring(values, "\0"), True).as_py()
        if first >= 0:
            raise TaskInputError(f"{source}: row {first + 1} of {table.num_rows}: the {what} {_NUL_REMEDY}")
    return pa.table({"text": texts, "label": labels})
