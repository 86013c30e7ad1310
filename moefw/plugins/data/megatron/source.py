"""Prepares an indexed dataset: checks it once, and keeps beside it what a run needs besides the ids."""

from __future__ import annotations

import hashlib
import stat
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from moefw.core.errors import DataError, os_reason
from moefw.plugins.data.hashed import CHUNK_BYTES, HashedFile, KnownHashes, SeenHashes, chunk_hashes, num_chunks
from moefw.plugins.data.megatron.files import pair
from moefw.plugins.data.megatron.index import read_index
from moefw.plugins.data.numbers import NumberFile
from moefw.plugins.data.prepared import HELDOUT_TEXT, SEEN, describe, kept_in, prepare_folder
from moefw.plugins.data.source import FORMAT, PreparedSource, encoder
from moefw.plugins.data.tokenizers import TextTokenizer, fingerprint, load_tokenizer, not_a_tokenizer, read_tokenizer
from moefw.plugins.data.tokens import STARTS, TokenFile
from moefw.runtime.windows import read_ids
from moefw.system.stamps import stamp

HELDOUT_TOKENS: Final = 1 << 24
"""More are not held out: their text is kept, and compressed to compare."""
DECODED_TOKENS: Final = 1 << 18
SAMPLED_CHUNKS: Final = 64
"""16 MiB of the ids, which tell apart files that ranks take for the same."""

_STARTS = "documents.starts"


def prepare_megatron(path: str, tokenizer: str, heldout: float, cache_dir: Path) -> PreparedSource:
    """Data, checked in this call unless an earlier one did it. Raises DataError."""
    ids, index = pair(path)
    content = read_tokenizer(tokenizer)
    name = tokenizer if content is None else fingerprint(content)
    files = [(str(file), *_identity(file)) for file in (ids, index)]
    with kept_in(cache_dir):
        prepared = prepare_folder(
            cache_dir,
            (("megatron", FORMAT, name, heldout), *files),
            lambda folder: _fill(folder, ids, index, tokenizer, content, heldout),
        )
        dtype = np.dtype(prepared.meta["dtype"])
        num_tokens = prepared.meta["tokens"]
        numbers = NumberFile(_open(ids, prepared.folder), dtype)
        starts = NumberFile(prepared.open(_STARTS), STARTS)
        cut = num_tokens["train"]
        return PreparedSource(
            prepared,
            load_tokenizer(tokenizer, content),
            train=TokenFile(numbers, starts, end=cut),
            heldout=TokenFile(numbers, starts, begin=cut),
        )


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        reason = os_reason(error)
        raise DataError(f"data.path: {path} cannot be read: {reason}.", "Name a pair NAME.bin and NAME.idx.") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data.path: {path} is no regular file.", "Name a pair NAME.bin and NAME.idx.")
    return status.st_size, status.st_mtime_ns


def _open(ids: Path, folder: Path) -> HashedFile:
    fix = f"Restore it from a copy; if it is as it should be, delete the folder {folder}."
    return HashedFile(ids, size=ids.stat().st_size, hashes=SeenHashes(folder / SEEN), fix=fix)


def _fill(folder: Path, ids: Path, index: Path, name: str, content: bytes | None, share: float) -> None:
    with (folder / _STARTS).open("wb") as file:
        described = read_index(index, ids, file)
    starts = _starts(folder / _STARTS)
    hashed = _open(ids, folder)
    cut = _cut(starts, described.num_tokens, share)
    heldout = TokenFile(NumberFile(hashed, described.dtype), starts, begin=cut)
    with encoder(name, content) as (tokenizer, _), (folder / HELDOUT_TEXT).open("wb") as raw:
        raw.writelines(_text(heldout, tokenizer, name))
    meta = {
        "format": FORMAT,
        "source": str(ids),
        "tokenizer": tokenizer.fingerprint,
        "dtype": described.dtype.str,
        "documents": described.num_documents,
        "tokens": {"train": cut, "heldout": described.num_tokens - cut},
        "sample": _sample(hashed),
    }
    describe(folder, meta)


def _starts(path: Path) -> NumberFile:
    """Open document starts that are not described yet."""
    hashes = KnownHashes(chunk_hashes(path))
    return NumberFile(HashedFile(path, size=path.stat().st_size, hashes=hashes, fix="Run again."), STARTS)


def _cut(starts: NumberFile, num_tokens: int, share: float) -> int:
    """Number of tokens to train on: to a document's start, unless that leaves less than half of a share."""
    if num_tokens < 2:
        raise DataError(f"data.path: {num_tokens} token is too little to hold some out.", "Name more text.")
    num_heldout = max(1, min(round(num_tokens * share), HELDOUT_TOKENS, num_tokens - 1))
    target = num_tokens - num_heldout
    place = bisect_left(starts, target)
    if place < len(starts) and num_tokens - starts[place] >= num_heldout / 2:
        return starts[place]
    return target


def _text(stream: TokenFile, tokenizer: TextTokenizer, name: str) -> Iterator[bytes]:
    """Yield the text of the documents of a stream, without the separators at their ends."""
    bounds = sorted({0, *stream.document_starts(0, len(stream)).tolist(), len(stream)})
    for begin, end in pairwise(bounds):
        for first in range(begin, end, DECODED_TOKENS):
            stamp("preparing data: held-out text")
            stop = min(first + DECODED_TOKENS, end)
            ids = read_ids(stream, first, stop - first, tokenizer.vocab_size).tolist()
            if stop == end and ids[-1] == tokenizer.separator:
                del ids[-1]
            try:
                yield tokenizer.decode(ids).encode("utf-8", "replace")
            except ValueError as error:
                raise not_a_tokenizer(name, f"it cannot decode ids: {error}") from error


def _sample(file: HashedFile) -> str:
    """Hash of chunks spread over a file, the first and the last among them."""
    digest = hashlib.sha256()
    last = num_chunks(file.size) - 1
    for chunk in sorted({last * part // (SAMPLED_CHUNKS - 1) for part in range(SAMPLED_CHUNKS)}):
        start = chunk * CHUNK_BYTES
        digest.update(file.read(start, min(CHUNK_BYTES, file.size - start)))
    return digest.hexdigest()
