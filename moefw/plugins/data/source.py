"""Prepares a corpus once, in a folder of the cache, and serves it from there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import final

from moefw.core.data import TOKENIZER, DataSource, TokenStream
from moefw.core.errors import DataError
from moefw.plugins.data.bpe import train_bpe
from moefw.plugins.data.child import EncodingError
from moefw.plugins.data.corpus import Corpus, find_corpus
from moefw.plugins.data.corpus_ids import Encode, write_tokens
from moefw.plugins.data.encoding import EncodingProcess
from moefw.plugins.data.numbers import NumberFile
from moefw.plugins.data.options import Options, Tokenized
from moefw.plugins.data.prepared import HELDOUT, HELDOUT_TEXT, TRAIN, Prepared, describe, kept_in, prepare_folder
from moefw.plugins.data.progress import EncodingProgress
from moefw.plugins.data.split import Split, TextDocument, split_corpus
from moefw.plugins.data.tokenizers import (
    TextTokenizer,
    fingerprint,
    load_tokenizer,
    not_a_tokenizer,
    read_json,
    read_tokenizer,
)
from moefw.plugins.data.tokens import STARTS, TokenFile, starts_file, token_dtype
from moefw.system.files import replaced_file

FORMAT = 3
"""Increased when the prepared files of the same corpus would change."""


@final
class PreparedSource(DataSource):
    """Streams, the held-out text in a prepared folder, and the tokenizer of both."""

    def __init__(
        self, prepared: Prepared, tokenizer: TextTokenizer, *, train: TokenStream, heldout: TokenStream
    ) -> None:
        self.train = train
        self.heldout = heldout
        self.vocab_size = tokenizer.vocab_size
        self.fingerprint = tokenizer.fingerprint
        self.digest = prepared.digest
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
        """Token ids of ``text``; a lone surrogate is read as a question mark. Raises DataError."""
        try:
            ids: list[int] = self._tokenizer.encode(text.encode("utf-8", "replace")).tolist()
        except ValueError as error:
            what = f"data.tokenizer: this text cannot be encoded: {error}."
            raise DataError(what, "Use other words; the tokenizer does not know these.") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no text become the replacement character. Raises DataError."""
        try:
            return self._tokenizer.decode(ids)
        except ValueError as error:
            what = f"data.tokenizer: these ids cannot be decoded: {error}."
            raise DataError(what, "The decoder in the tokenizer.json is at fault.") from error

    def save_tokenizer(self, folder: Path) -> None:
        """Write ``tokenizer.json``, unless ids are bytes or it is there already."""
        path = folder / TOKENIZER
        content = self._tokenizer.content
        if content is not None and not (path.is_file() and path.read_bytes() == content):
            with replaced_file(path) as scratch:
                scratch.write_bytes(content)


def prepare_text(options: Options, cache_dir: Path) -> PreparedSource:
    """Text that ``options`` name, tokenized in this call unless an earlier one did it. Raises DataError."""
    corpus = find_corpus(options.path, options.suffixes)
    return prepare_corpus(corpus, options, cache_dir, lambda: split_corpus(corpus, options.heldout))


def prepare_corpus(
    corpus: Corpus, options: Tokenized, cache_dir: Path, split: Callable[[], Split], kind: Iterable[str] = ()
) -> PreparedSource:
    """Documents of a corpus, tokenized in this call unless an earlier one did it. Raises DataError.

    ``split`` reads them; ``kind`` says how, if not as text.
    """
    content = None if options.bpe_size else read_tokenizer(options.tokenizer)
    name = options.tokenizer if content is None else fingerprint(content)
    head = (FORMAT, str(corpus.root), name, options.heldout, *kind)
    identity = (head, *((file.name, file.stop, file.mtime_ns) for file in corpus.files))
    with kept_in(cache_dir):
        prepared = prepare_folder(
            cache_dir, identity, lambda folder: _fill(folder, str(corpus.root), content, options, split())
        )
        if options.bpe_size:
            content = prepared.read(TOKENIZER)
        tokenizer = load_tokenizer(options.tokenizer, content)
        train, heldout = (_stream(prepared, name, tokenizer.vocab_size) for name in (TRAIN, HELDOUT))
        return PreparedSource(prepared, tokenizer, train=train, heldout=heldout)


def _stream(prepared: Prepared, name: str, vocab_size: int) -> TokenFile:
    ids = NumberFile(prepared.open(name), token_dtype(vocab_size))
    return TokenFile(ids, NumberFile(prepared.open(starts_file(Path(name)).name), STARTS))


def _fill(folder: Path, root: str, content: bytes | None, options: Tokenized, split: Split) -> None:
    if options.bpe_size:
        content = train_bpe(_text(split.sample), options.bpe_size)
        (folder / TOKENIZER).write_bytes(content)
    with encoder(options.tokenizer, content) as (tokenizer, encode), EncodingProgress(split.num_bytes) as progress:
        num_tokens = {
            "train": write_tokens(folder / TRAIN, split.train, tokenizer, encode, progress.advance),
            "heldout": write_tokens(folder / HELDOUT, split.heldout, tokenizer, encode, progress.advance),
        }
    for side, count in num_tokens.items():
        if not count:
            what = f"data.tokenizer: the {side} text of {root} gives no token at all."
            raise DataError(what, "Use another tokenizer or another text.")
    with (folder / HELDOUT_TEXT).open("wb") as raw:
        raw.writelines(_text(split.heldout))
    meta = {
        "format": FORMAT,
        "source": root,
        "tokenizer": tokenizer.fingerprint,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "documents": dict(split.counts),
        "tokens": num_tokens,
    }
    describe(folder, meta)


def _text(documents: Iterable[TextDocument]) -> Iterator[bytes]:
    return (piece for document in documents for piece in document.pieces())


def tokenizer_beside(path: Path) -> bytes | None:
    """Content of the ``tokenizer.json`` beside weights, to copy it. None: there is no such name.

    A link is followed, as Hugging Face's cache has one to every file. So the file may be any that the link's author
    names, and nothing is copied that no tokenizer loads from. Raises DataError.
    """
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path)
        EncodingProcess(content).close()
    except (OSError, EncodingError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        fix = "Download it again, or take it out of the folder."
        raise DataError(f"{path} is not a tokenizer.json: {reason}.", fix) from error
    return content


@contextmanager
def encoder(name: str, content: bytes | None) -> Iterator[tuple[TextTokenizer, Encode]]:
    """Yield a tokenizer and the function that encodes batches: for bytes the tokenizer itself, else its process."""
    if content is None:
        tokenizer = load_tokenizer(name, None)
        yield tokenizer, lambda texts: [tokenizer.encode(text) for text in texts]
        return
    try:
        process = EncodingProcess(content)
    except EncodingError as error:
        raise not_a_tokenizer(name, error.reason) from error
    with process:
        yield load_tokenizer(name, content, process), process.encode
