"""Reads rows, as often as they are needed: none is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moefw.core.errors import DataError
from moefw.plugins.data.corpus import find_corpus, unreadable
from moefw.plugins.data.row_sides import split_rows
from moefw.plugins.data.rows.options import Rows
from moefw.plugins.data.source import PreparedSource, prepare_corpus
from moefw.plugins.data.tables import table_rows

Read = Callable[[Path, str], Iterator[tuple[str, Any]]]
"""Yields the place and the value of a field of each row of a file."""


def prepare_rows(options: Rows, read: Read, cache_dir: Path) -> PreparedSource:
    """Rows, tokenized in this call unless an earlier one did it. Raises DataError."""
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


def parquet(path: Path, field: str) -> Iterator[tuple[str, str | None]]:
    """Yield the place and the value of a column of each row. Only that column is read. Raises DataError."""

    def column(schema: Any) -> list[str]:
        _check_column(path, field, schema)
        return [field]

    for place, row in table_rows(path, column):
        yield place, row[field]


def _check_column(path: Path, field: str, schema: Any) -> None:
    """Raise DataError unless the schema of a file has one column ``field``, of strings or of nothing but null."""
    from pyarrow import types

    columns = [column.type for column in schema if column.name == field]
    if not columns:
        raise _no_field(str(path), field, schema.names)
    if len(columns) > 1:
        what = f"data.field: {path} has {len(columns)} columns called {field!r}."
        raise DataError(what, "Rename all but one, or name another one in data.field.")
    (kind,) = columns
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not any(fits(values) for fits in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)):
        what = f"data.field: the column {field!r} of {path} holds values of type {kind} and no text."
        raise DataError(what, "Name a column of strings in data.field.")


def _no_field(place: str, field: str, names: Any) -> DataError:
    known = ", ".join(repr(name) for name in names) or "nothing"
    return DataError(f"data.field: {place} has no {field!r}; it has {known}.", "Name one of these in data.field.")
