"""Reads rows, as often as they are needed: none is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path
from typing import Any

from moefw.core.errors import DataError
from moefw.training.data.corpus import find_corpus, unreadable
from moefw.training.data.rows.options import INSTALL, Rows
from moefw.training.data.rows.sides import split_rows
from moefw.training.data.source import PreparedSource, prepare_corpus

Read = Callable[[Path, str], Iterator[tuple[str, Any]]]
"""Yields the place and the value of a field of each row of a file."""


def prepare_rows(options: Rows, read: Read, cache_dir: Path) -> PreparedSource:
    """Return the rows, tokenized in this call unless an earlier one did it. Raises DataError."""
    corpus = find_corpus(options.path, (options.ending,))

    def values() -> Iterator[tuple[str, Any]]:
        for file in corpus.files:
            yield from read(file.path, options.field)

    kind = (options.ending, options.field)
    return prepare_corpus(corpus, options, cache_dir, lambda: split_rows(values, options.heldout, corpus.root), kind)


def json_lines(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of a field of each line that is not blank. Raises DataError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield f"{path}:{number}", _value(f"{path}:{number}", line, field)
    except OSError as error:
        raise unreadable(error, path) from error


def _value(place: str, line: bytes, field: str) -> Any:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}.", "Write an object a line, or leave the line out.") from error
    if not isinstance(row, dict):
        what = f"{place} holds a {type(row).__name__} and no object."
        raise DataError(what, f'Write for example {{"{field}": "some text"}}.')
    if field not in row:
        raise _no_field(place, field, row)
    return row[field]


def parquet(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of a column of each row. Only that column is read. Raises DataError."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"datasets, which reads Parquet files, cannot be imported: {error}.", INSTALL) from error

    def rows(**options: Any) -> Any:
        return load_dataset("parquet", data_files=[escape(str(path))], split="train", streaming=True, **options)

    try:
        names = rows().column_names or ()
        if field not in names:
            raise _no_field(str(path), field, names)
        for number, row in enumerate(rows(columns=[field]), 1):
            yield f"{path}, row {number}", row[field]
    except DataError:
        raise
    except Exception as error:  # the library raises its own errors, and those of pyarrow and fsspec
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{path} cannot be read: {reason}.", "Name whole Parquet files.") from error


def _no_field(place: str, field: str, names: Any) -> DataError:
    known = ", ".join(repr(name) for name in names) or "nothing"
    return DataError(f"data.field: {place} has no {field!r}; it has {known}.", "Name one of these in data.field.")
