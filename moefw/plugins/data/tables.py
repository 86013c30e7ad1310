"""Reads the rows of Parquet files, as often as they are needed: few are held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moefw.core.errors import DataError

PACKAGE: Final = "pyarrow"
INSTALL: Final = "Install it with: pip install 'moefw[parquet]', or convert the files to JSON lines."
READ_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 16
"""Rows of a Parquet file that are held at once: their text may be many times as large as the file."""


def table_rows(path: Path, columns: Callable[[Any], Sequence[str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, and its values in the columns that ``columns`` names, given the file's schema.

    Only these are read. Metadata of a column other than its type are not looked at: by the features of Hugging Face's
    ``datasets`` its values may be paths and URLs, which somebody else wrote. Raises DataError.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"pyarrow, which reads Parquet files, cannot be imported: {error}.", INSTALL) from error
    try:
        # An OSFile is the file of this name. Of a string, pyarrow makes a URL if there is no such file.
        with pyarrow.OSFile(str(path)) as file, ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES) as table:
            chosen = columns(table.schema_arrow)
            number = 0
            for batch in table.iter_batches(BATCH_ROWS, columns=list(chosen), use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{path} cannot be read: {reason}.", "Name whole Parquet files.") from error
