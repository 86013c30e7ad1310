"""Encodes documents into a token file, in batches over all cores. Batches do not change the ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefw.core.errors import DataError
from moefw.plugins.data.child import EncodingError
from moefw.plugins.data.split import TextDocument
from moefw.plugins.data.tokenizers import TextTokenizer
from moefw.plugins.data.tokens import TokenWriter

PART_BYTES = 1 << 16
"""64 KiB: as fast as larger parts on one core, and a batch has parts for 64 cores."""
BATCH_BYTES = 1 << 22
WHOLE_BATCH_BYTES = 1 << 24
"""Batch size for text that only :func:`pieces` cuts: four of its pieces."""

_END_OF_WORD = re.compile(rb"[!-~](?=[ \n])")

Encode = Callable[[Sequence[bytes]], Sequence[NDArray[np.integer[Any]]]]
"""Returns the ids of each of several texts. Raises EncodingError."""


def write_tokens(
    path: Path,
    documents: Iterable[TextDocument],
    tokenizer: TextTokenizer,
    encode: Encode,
    done: Callable[[int], None],
) -> int:
    """Write the ids of documents in order, and where each document starts; return the number of ids.

    ``done`` gets the number of bytes encoded. The ids equal those of each document's pieces, encoded one by one. Raises
    DataError that names a failing document.
    """
    separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=np.int64)
    fine = tokenizer.parts_after_words
    before = None
    with TokenWriter(path, vocab_size=tokenizer.vocab_size) as tokens:
        for batch in _batches(documents, fine=fine):
            for (document, part), ids in zip(batch, _encoded(batch, encode), strict=True):
                if document is not before:
                    if before is not None:
                        tokens.write(separator)
                    tokens.start_document()
                    before = document
                tokens.write(ids)
                done(len(part))
    return tokens.num_tokens


def after_words(text: bytes, size: int) -> Iterator[bytes]:
    """Yield parts of a little over ``size`` bytes; each but the first begins with the white space after a word."""
    start = 0
    while start < len(text):
        cut = _END_OF_WORD.search(text, start + size)
        end = cut.end() if cut else len(text)
        yield text[start:end]
        start = end


def _batches(documents: Iterable[TextDocument], *, fine: bool) -> Iterator[list[tuple[TextDocument, bytes]]]:
    """Yield batches of parts of documents in order, each of about the batch size in bytes."""
    room = most = BATCH_BYTES if fine else WHOLE_BATCH_BYTES
    batch: list[tuple[TextDocument, bytes]] = []
    for document in documents:
        for piece in document.pieces():
            for part in after_words(piece, PART_BYTES) if fine else [piece]:
                batch.append((document, part))
                room -= len(part)
                if room <= 0:
                    yield batch
                    batch = []
                    room = most
    yield batch


def _encoded(batch: Sequence[tuple[TextDocument, bytes]], encode: Encode) -> Sequence[NDArray[np.integer[Any]]]:
    try:
        return encode([part for _, part in batch])
    except EncodingError as error:
        document, _ = batch[error.text]
        what = f"data.tokenizer: {document.place} cannot be encoded: {error.reason}."
        raise DataError(what, "Use another tokenizer, or leave that text out.") from error
