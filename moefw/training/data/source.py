"""Prepares a corpus once, in a folder of the cache, and serves it from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import final

from moefw.core.data import DataSource
from moefw.core.errors import DataError
from moefw.training.data.bpe import train_bpe
from moefw.training.data.corpus import CACHE_TAG, Corpus, Document, find_corpus, halves, pieces, text_documents
from moefw.training.data.corpus_ids import Encode, write_tokens
from moefw.training.data.encoding import EncodingError, EncodingProcess
from moefw.training.data.options import Options
from moefw.training.data.prepared import HELDOUT, HELDOUT_TEXT, TRAIN, Prepared, describe, new_folder, open_prepared
from moefw.training.data.progress import EncodingProgress
from moefw.training.data.tokenizers import TextTokenizer, fingerprint, load_tokenizer, not_a_tokenizer, read_tokenizer
from moefw.training.data.tokens import TokenFile, token_dtype
from moefw.training.folder import TOKENIZER

FORMAT = 2
"""Increased when the prepared files of the same corpus would change."""

_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by moefw; may be deleted.\n"


@final
class TextSource(DataSource):
    """The data in a prepared folder."""

    def __init__(self, prepared: Prepared, tokenizer: TextTokenizer) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        self.train = TokenFile(prepared.open(TRAIN), dtype=dtype)
        self.heldout = TokenFile(prepared.open(HELDOUT), dtype=dtype)
        self.vocab_size = tokenizer.vocab_size
        self.fingerprint, self.digest = tokenizer.fingerprint, prepared.digest
        self._heldout_text = prepared.open(HELDOUT_TEXT)
        self._tokenizer = tokenizer

    @cached_property
    def heldout_bytes(self) -> bytes:  # type: ignore[override]
        """The held-out documents, concatenated in order and read on first use. Raises DamagedDataError."""
        return self._heldout_text.read(0, self.num_heldout_bytes)

    @property
    def num_heldout_bytes(self) -> int:
        """The number of bytes of the held-out documents."""
        return self._heldout_text.size

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; a lone surrogate is read as a question mark. Raises DataError."""
        try:
            ids: list[int] = self._tokenizer.encode(text.encode("utf-8", "replace")).tolist()
        except ValueError as error:
            what = f"data.tokenizer: this text cannot be encoded: {error}."
            raise DataError(what, "Use other words; the tokenizer does not know these.") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are no text become the replacement character. Raises DataError."""
        try:
            return self._tokenizer.decode(ids)
        except ValueError as error:
            what = f"data.tokenizer: these ids cannot be decoded: {error}."
            raise DataError(what, "The decoder in the tokenizer.json is at fault.") from error

    def save_tokenizer(self, folder: Path) -> None:
        """Write ``tokenizer.json``, unless ids are bytes or it is there already."""
        path, content = folder / TOKENIZER, self._tokenizer.content
        if content is not None and not (path.is_file() and path.read_bytes() == content):
            path.write_bytes(content)


def prepare_text(options: Options, cache_dir: Path) -> TextSource:
    """Return the corpus that ``options`` name, tokenized in this call unless an earlier one did it.

    Files are written to a temporary folder that is renamed when complete, so a process may be killed at any time, and
    several may prepare at once. Raises DataError.
    """
    content = None if options.bpe_size else read_tokenizer(options.tokenizer)
    name = options.tokenizer if content is None else fingerprint(content)
    corpus = find_corpus(options.path, options.suffixes)
    folder = cache_dir / _digest(corpus, name, options.heldout)
    try:
        prepared = open_prepared(folder)
        if prepared is None:
            with new_folder(folder) as partial:
                _fill(partial, corpus, content, options)
            prepared = open_prepared(folder)
        if prepared is None:
            what = f"the prepared data in {folder} have changed as soon as they were written."
            raise DataError(what, "Leave that folder alone, or set MOEFW_CACHE to another one.")
        if options.bpe_size:
            content = prepared.read(TOKENIZER)
        return TextSource(prepared, load_tokenizer(options.tokenizer, content))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        what = f"the prepared data cannot be kept in {cache_dir}: {reason}."
        raise DataError(what, "Set MOEFW_CACHE to a folder that can be written and has room.") from error


def split_documents(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held out, neither empty, each in the order given.

    A document is held out if the hash of its name, scaled to [0, 1), is below ``share``, independent of other
    documents. If that leaves a side empty, the document nearest to it is moved. A single document is cut. Raises
    DataError if it is too small for that.
    """
    if len(documents) == 1:
        head, tail = halves(documents[0], share)
        return [head], [tail]
    places = {document: _place(document.name) for document in documents}
    ranked = sorted(documents, key=places.__getitem__)
    num_heldout = sum(place < share for place in places.values())
    heldout = set(ranked[: min(max(1, num_heldout), len(ranked) - 1)])
    return [d for d in documents if d not in heldout], [d for d in documents if d in heldout]


def _place(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)


def _digest(corpus: Corpus, tokenizer: str, heldout: float) -> str:
    """Return the folder name of prepared data: other files, sizes, times or options give another name."""
    digest = hashlib.sha256()
    head = (FORMAT, str(corpus.root), tokenizer, heldout)
    for entry in (head, *((file.name, file.stop, file.mtime_ns) for file in corpus.files)):
        digest.update(json.dumps(entry).encode() + b"\n")
    return digest.hexdigest()[:32]


def _fill(folder: Path, corpus: Corpus, content: bytes | None, options: Options) -> None:
    documents = text_documents(corpus)
    train, heldout = split_documents(documents, options.heldout)
    (folder / CACHE_TAG).write_text(_TAG, encoding="utf-8")
    if options.bpe_size:
        content = _vocabulary(train, options.bpe_size)
        (folder / TOKENIZER).write_bytes(content)
    size = sum(document.stop - document.start for document in (*train, *heldout))
    with _encoder(options.tokenizer, content) as (tokenizer, encode), EncodingProgress(size) as progress:
        num_tokens = {
            "train": write_tokens(folder / TRAIN, train, tokenizer, encode, progress.advance),
            "heldout": write_tokens(folder / HELDOUT, heldout, tokenizer, encode, progress.advance),
        }
    for side, count in num_tokens.items():
        if not count:
            what = f"data.tokenizer: the {side} text of {corpus.root} gives no token at all."
            raise DataError(what, "Use another tokenizer or another text.")
    with (folder / HELDOUT_TEXT).open("wb") as raw:
        raw.writelines(piece for document in heldout for piece in pieces(document))
    meta = {
        "format": FORMAT,
        "source": str(corpus.root),
        "tokenizer": tokenizer.fingerprint,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "documents": {"train": len(train), "heldout": len(heldout), "skipped": len(corpus.files) - len(documents)},
        "tokens": num_tokens,
    }
    describe(folder, meta)


def _vocabulary(documents: Sequence[Document], vocab_size: int) -> bytes:
    """Return a tokenizer made from documents, in an order that does not depend on other documents."""
    mixed = sorted(documents, key=lambda document: _place(document.name))
    return train_bpe((piece for document in mixed for piece in pieces(document)), vocab_size)


@contextmanager
def _encoder(name: str, content: bytes | None) -> Iterator[tuple[TextTokenizer, Encode]]:
    """Yield a tokenizer and the function that encodes batches: for bytes the tokenizer itself, else a process."""
    if content is None:
        tokenizer = load_tokenizer(name, None)
        yield tokenizer, lambda texts: [tokenizer.encode(text) for text in texts]
        return
    try:
        process = EncodingProcess(content)
    except EncodingError as error:
        raise not_a_tokenizer(name, error.reason) from error
    with process:
        yield load_tokenizer(name, content), process.encode
