"""Where labelled texts come from: the embedded grammar, local files, or a data set of the hub.

Every source ends as an Arrow table with the string columns "text" and "label", checked row by row.
"""

from __future__ import annotations

import json
import os
from codecs import getincrementaldecoder
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.interface import Split, TaskInputError

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

# What a row of JSON may take: more is no row.
_MAX_JSON_ROW_BYTES = 64 * 1024 * 1024
_MAX_HEADER_BYTES = 1024 * 1024
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

    from tasks.grammar import generate

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
                # The readers do not tell UTF-16, as spreadsheets save, from damage.
                getincrementaldecoder("utf-8")().decode(file.readline(_MAX_HEADER_BYTES))
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
        _require_columns(dataset.column_names, (text_column, label_column), source)
        labels = dataset.features[label_column]
        table = dataset.select_columns([text_column, label_column]).with_format("arrow")[:]
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


def label_names(tables: dict[Split, pa.Table], sources: dict[Split, str]) -> list[str]:
    """Returns the labels of the training split in order: by value when all are whole numbers, else by name.

    Args:
        tables: Both splits.
        sources: How to name the origin of each in a message.

    Raises:
        TaskInputError: There is one label only, or the validation split has one that training lacks.
    """
    labels = set(tables["train"]["label"].unique().to_pylist())
    if len(labels) < 2:
        raise TaskInputError(
            f"{sources['train']}: all training rows have the label {labels.pop()!r}; two or more labels are needed"
        )
    unseen = set(tables["validation"]["label"].unique().to_pylist()) - labels
    if unseen:
        raise TaskInputError(
            f"{sources['validation']}: the validation label {sorted(unseen)[0]!r} does not occur in training "
            f"(there: {', '.join(sorted(labels)[:10])})"
        )
    whole_numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    return sorted(labels, key=int) if whole_numbers else sorted(labels)


def _read_delimited(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",", newlines_in_values=True)
    with csv.open_csv(path, parse_options=parse) as reader:
        _require_columns(reader.schema.names, columns, source)
    convert = csv.ConvertOptions(include_columns=list(columns), column_types={name: pa.string() for name in columns})
    return csv.read_csv(path, parse_options=parse, convert_options=convert)


def _read_jsonl(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    """Reads with Python's own parser: that of Arrow 26 crashes on a line that is null."""
    import pyarrow as pa

    values: dict[str, list[Any]] = {column: [] for column in columns}
    present: dict[str, None] = {}
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_JSON_ROW_BYTES), b""), start=1):
            if len(line) == _MAX_JSON_ROW_BYTES:
                raise _no_json(source, number, f"it is longer than {_MAX_JSON_ROW_BYTES} bytes")
            text = line.decode()
            if not text.strip():
                continue
            try:
                row = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise _no_json(source, number, str(error)) from error
            if not isinstance(row, dict):
                raise _no_json(source, number, f"it is a {type(row).__name__}")
            present |= dict.fromkeys(row)
            for column in columns:
                values[column].append(row.get(column))
    if present:
        _require_columns(list(present), columns, source)
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _read_parquet(path: Path, columns: tuple[str, str], source: str) -> pa.Table:
    from pyarrow import parquet

    _require_columns(parquet.read_schema(path).names, columns, source)
    _require_room(_unpacked_bytes([path], columns), source)
    return parquet.read_table(path, columns=list(columns))


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


def _require_columns(present: list[str], wanted: tuple[str, str], source: str) -> None:
    for column, option in zip(wanted, ("--text-column", "--label-column"), strict=True):
        if column not in present:
            raise TaskInputError(
                f"{source}: there is no column {column!r}; choose {option} from {', '.join(present[:20])}"
            )
        if present.count(column) > 1:
            raise TaskInputError(f"{source}: there are {present.count(column)} columns {column!r}; rename all but one")


def _checked(table: pa.Table, text_column: str, label_column: str, source: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    if table.num_rows == 0:
        raise TaskInputError(f"{source}: there are no rows")
    if not (
        pa.types.is_string(table.schema.field(text_column).type)
        or pa.types.is_large_string(table.schema.field(text_column).type)
    ):
        kind = table.schema.field(text_column).type
        raise TaskInputError(f"{source}: column {text_column!r} holds {kind}, not text; choose another --text-column")
    try:
        labels = pc.cast(table[label_column], pa.string())
    except pa.ArrowException as error:
        kind = table.schema.field(label_column).type
        raise TaskInputError(
            f"{source}: column {label_column!r} holds {kind}, not labels; choose another --label-column"
        ) from error
    texts = pc.cast(table[text_column], pa.string())
    for what, values in (("text", texts), ("label", labels)):
        missing = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
        first = pc.index(missing, True).as_py()
        if first >= 0:
            raise TaskInputError(
                f"{source}: row {first + 1} of {table.num_rows} has no {what}; remove or complete such rows"
            )
    return pa.table({"text": texts, "label": labels})
