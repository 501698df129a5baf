"""The `datasets` library as a source of labelled texts: datasets of the hub and local directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.interface import Split, TaskInputError
from tasks.text.columns import checked_table, find_columns
from tasks.text.limits import is_compressed, parquet_bytes, require_memory

if TYPE_CHECKING:
    import pyarrow as pa


def hub_tables(name: str, *, text_column: str, label_column: str) -> dict[Split, pa.Table]:
    """Loads a dataset through the `datasets` library.

    Args:
        name: A hub id, a hub id and a configuration as "id:configuration", or a local directory.
        text_column: The name of the column that holds the texts.
        label_column: The name of the column that holds the labels.

    Returns:
        For each split a table with the string columns "text" and "label"; the validation split is the dataset's
        "validation", or its "test" if it has no other.

    Raises:
        TaskInputError: The dataset cannot be loaded, or lacks a split or column.
    """
    import datasets
    import pyarrow as pa

    # The library's log adds nothing to the error that it raises.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path, _, config = name.partition(":")
    if Path(path).is_dir():
        try:
            _check_directory(Path(path), f"--dataset {name}")
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise TaskInputError(f"--dataset {name}: cannot be read ({reason}); check its files") from error
    try:
        splits: Any = datasets.load_dataset(path, config or None)
    except Exception as error:  # hub, cache and format errors share no base class
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise TaskInputError(
            f"--dataset {name}: cannot be loaded ({reason}); name a dataset of the hub or a directory, "
            "or use --train-file and --validation-file"
        ) from error
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    if "train" not in splits or held_out is None:
        raise TaskInputError(
            f"--dataset {name}: it needs the splits train and validation (or test), but has only {', '.join(splits)}"
        )
    columns = (text_column, label_column)
    try:
        return {
            "train": _table(splits["train"], columns, f"--dataset {name} (train)"),
            "validation": _table(splits[held_out], columns, f"--dataset {name} ({held_out})"),
        }
    except TaskInputError:
        raise
    except (pa.ArrowException, ValueError) as error:  # text that is not UTF-8, numbers that stand for no label
        reason = " ".join(str(error).split())[:300]
        raise TaskInputError(f"--dataset {name}: cannot be read ({reason}); correct its rows") from error


def _table(dataset: Any, columns: tuple[str, str], source: str) -> pa.Table:
    """Returns one split with the names of its labels in place of their numbers."""
    import datasets
    import pyarrow as pa

    text_column, label_column = columns
    found = find_columns(dataset.column_names, columns, source)
    labels = dataset.features[found[1]]
    table = dataset.select_columns(list(found)).with_format("arrow")[:].rename_columns(list(columns))
    if isinstance(labels, datasets.ClassLabel):
        # The hub's datasets mark a withheld label with -1.
        numbers = table[label_column].to_pylist()
        names = pa.array([None if number in (None, -1) else labels.int2str(number) for number in numbers], pa.string())
        table = pa.table({text_column: table[text_column], label_column: names})
    return checked_table(table, columns, source)


def _check_directory(directory: Path, source: str) -> None:
    """Refuses files that `datasets` would decompress or download, or that would not fit in memory.

    It looks at their content: `datasets` recognises formats by content, too, whatever a file's name.
    """
    files = [file for file in directory.rglob("*") if file.is_file()]
    for file in files:
        with file.open("rb") as content:
            first = content.read(300)
        if is_compressed(first):
            raise TaskInputError(f"{source}: {file.name} is compressed; decompress it first")
        if file.name == "README.md" and "data_files" in (text := file.read_text(errors="replace")) and "://" in text:
            raise TaskInputError(
                f"{source}: its README.md refers to data files on the network; download them, and remove the entry"
            )
    require_memory(sum(file.stat().st_size for file in files), source)
    require_memory(parquet_bytes(file for file in files if file.suffix == ".parquet"), source)
