"""What is not opened and not held in memory, whoever the data are from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tasks.interface import TaskInputError

# Longer rows are refused, since readers hold a row in memory, and an unclosed quote makes one row of many.
MAX_ROW_BYTES = 64 * 1024 * 1024

# An offset of a text, or a number.
_BYTES_OF_A_VALUE = 8
# The first bytes of gzip, zip, bzip2, xz, Zstandard, LZ4, 7z and rar.
_COMPRESSED = (
    b"\x1f\x8b",
    b"PK\x03\x04",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"7z\xbc\xaf",
    b"Rar!",
)


def is_compressed(start: bytes) -> bool:
    """Recognises compressed files and archives, whose size in memory cannot be known before they are read.

    Args:
        start: At least the first 262 bytes of a file, or all of it.

    Returns:
        True for the formats that Python and `datasets` would decompress, and for others like them.
    """
    is_archive = start[257:262] == b"ustar" and b"\0" in start[:257]
    return is_archive or start.startswith(_COMPRESSED)


def require_memory(num_bytes: int, source: str) -> None:
    """Refuses texts that would fill the memory: they are held in it, and tokenised there.

    Args:
        num_bytes: What the texts take.
        source: How a message names them.

    Raises:
        TaskInputError: They take more than a quarter of the machine's memory.
    """
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    if num_bytes > room:
        raise TaskInputError(
            f"{source}: {num_bytes / 2**30:.1f} GiB of texts are more than a quarter of this machine's memory; "
            "use fewer of them"
        )


def parquet_bytes(paths: Iterable[Path], columns: Iterable[str] | None = None) -> int:
    """Computes what parquet files take in memory, where a dictionary may repeat one text a billion times.

    Sizes are read from the files' metadata and dictionaries
    (https://parquet.apache.org/docs/file-format/data-pages/encodings/), so that nothing large is decompressed.

    Args:
        paths: The files.
        columns: The columns to be read; None for all.

    Returns:
        A number of bytes.

    Raises:
        TaskInputError: It is more than a quarter of the machine's memory.
    """
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
        require_memory(total, str(path))
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        texts = [field.name for field in wanted if any(is_kind(field.type) for is_kind in kinds)]
        file = parquet.ParquetFile(path, read_dictionary=texts)
        for batch in file.iter_batches(columns=texts) if texts else ():
            for column in batch.columns:
                if pa.types.is_dictionary(column.type):
                    lengths = pc.binary_length(column.dictionary)
                    total += pc.sum(pc.take(lengths, column.indices)).as_py() or 0
            require_memory(total, str(path))
    return total
