"""The rows to train on and those held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from moefw.core.errors import DataError
from moefw.plugins.data.bpe import SAMPLE_BYTES
from moefw.plugins.data.split import Split, TextDocument, hash_place
from moefw.system.stamps import stamp

STAMP_ROWS: Final = 1000

Values = Callable[[], Iterable[tuple[str, Any]]]
"""Reads places and values of all rows again."""


@frozen
class Row(TextDocument):
    """The text of a row."""

    place: str
    text: bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the text."""
        yield self.text


@frozen
class Side(Iterable[Row]):
    """The rows whose text draws a number from ``low`` to below ``high``."""

    values: Values
    low: float
    high: float

    def __iter__(self) -> Iterator[Row]:
        return (row for drawn, row in _rows(self.values) if row.text and self.low <= drawn < self.high)


def split_rows(values: Values, share: float, root: Path) -> Split:
    """Sides of rows: held out are those whose text draws a number below ``share``.

    If that leaves a side empty, the text nearest to it is moved. Raises DataError if there are no two different texts.
    """
    drawn = [1.0, 0.0]
    for number, row in _rows(values):
        if row.text:
            drawn = [min(drawn[0], number), max(drawn[1], number)]
    low, high = drawn
    if low >= high:
        content = "one text, in all rows" if low == high else "no text"
        raise DataError(f"data.path: {root} holds {content}; some are held out.", "Name files with at least two texts.")
    cut = math.nextafter(low, 1.0) if share <= low else min(share, high)
    counts = {"train": 0, "heldout": 0, "skipped": 0}
    num_bytes = 0
    train_bytes = 0
    for number, row in _rows(values):
        if not row.text:
            side = "skipped"
        elif number < cut:
            side = "heldout"
        else:
            side = "train"
            train_bytes += len(row.text)
        counts[side] += 1
        num_bytes += len(row.text)
    left_out = max(0.0, 1.0 - SAMPLE_BYTES / train_bytes)
    return Split(
        train=Side(values, cut, 1.0),
        heldout=Side(values, 0.0, cut),
        sample=Side(values, cut + (1.0 - cut) * left_out, 1.0),
        num_bytes=num_bytes,
        counts=counts,
    )


def _rows(values: Values) -> Iterator[tuple[float, Row]]:
    """Yield all rows with the number that their text draws. The text of a row that holds none is empty."""
    for number, (place, value) in enumerate(values()):
        if number % STAMP_ROWS == 0:
            stamp(f"preparing data: {place}")
        text = _text(place, value)
        yield hash_place(text), Row(place, text)


def _text(place: str, value: Any) -> bytes:
    if value is None or (isinstance(value, str) and (value.isspace() or "\0" in value)):
        return b""
    if not isinstance(value, str):
        what = f"data.field: {place} holds a {type(value).__name__} and no text."
        raise DataError(what, "Name the field of the text in data.field.")
    try:
        return value.encode()
    except UnicodeEncodeError:
        return b""
