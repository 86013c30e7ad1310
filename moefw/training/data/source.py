"""Prepares a corpus once, in a folder of the cache, and serves it from there."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from moefw.core.data import DataSource
from moefw.core.errors import DataError
from moefw.training.data.bpe import train_bpe
from moefw.training.data.corpus import CACHE_TAG, Corpus, Document, find_corpus, halves, pieces, text_documents
from moefw.training.data.tokenizers import JsonTokenizer, TextTokenizer, fingerprint, load_tokenizer
from moefw.training.data.tokens import TokenFile, TokenWriter, token_dtype
from moefw.training.folder import TOKENIZER

if TYPE_CHECKING:
    from moefw.training.data import Text

FORMAT = 1
"""Counted up when files of the same corpus would come out differently."""

_FILES = ("train.bin", "heldout.bin", "heldout.raw")
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by moefw; may be deleted.\n"


@final
class TextSource(DataSource):
    """The data in a prepared folder."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        self.train = TokenFile(folder / "train.bin", dtype=dtype)
        self.heldout = TokenFile(folder / "heldout.bin", dtype=dtype)
        self.vocab_size = tokenizer.vocab_size
        self.fingerprint = tokenizer.fingerprint
        self._folder = folder
        self._tokenizer = tokenizer

    @cached_property
    def heldout_bytes(self) -> bytes:  # type: ignore[override]
        """The held-out documents one after the other, read when first asked for."""
        return (self._folder / "heldout.raw").read_bytes()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; a lone surrogate is read as a question mark."""
        ids: list[int] = self._tokenizer.encode(text.encode("utf-8", "replace")).tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are no text become the replacement character."""
        return self._tokenizer.decode(ids)

    def save_tokenizer(self, folder: Path) -> None:
        """Write ``tokenizer.json``, unless ids are bytes or it lies there already."""
        path, content = folder / TOKENIZER, self._tokenizer.content
        if content is not None and not (path.is_file() and path.read_bytes() == content):
            path.write_bytes(content)


def prepare_text(options: Text, cache_dir: Path) -> TextSource:
    """Return the corpus that ``options`` name, tokenized in this call unless an earlier one did it.

    Files are written beside their place and moved there whole, so a process may be killed at any time, and
    several may prepare at once. Raises DataError.
    """
    named = None if options.bpe_size else load_tokenizer(options.tokenizer)
    corpus = find_corpus(options.path, options.suffixes)
    folder = cache_dir / _digest(corpus, named.fingerprint if named else options.tokenizer, options.heldout)
    try:
        if not _is_whole(folder):
            _remove(folder)
            _build(folder, corpus, named, options)
        return TextSource(folder, named or JsonTokenizer((folder / TOKENIZER).read_bytes()))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        what = f"the prepared data cannot be kept in {cache_dir}: {reason}."
        raise DataError(what, "Set MOEFW_CACHE to a folder that can be written and has room.") from error


def split_documents(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on and those held out, neither empty, each in the order given.

    A document is held out if the hash of its name falls into ``share``, whatever else the corpus holds; where that
    leaves a side empty, the document nearest to it is moved. A single document is cut. Raises DataError if it is
    too small for that.
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
    """Return a name for what is prepared: other files, sizes, times or options give another name."""
    digest = hashlib.sha256()
    head = (FORMAT, str(corpus.root), tokenizer, heldout)
    for entry in (head, *((file.name, file.stop, file.mtime_ns) for file in corpus.files)):
        digest.update(json.dumps(entry).encode() + b"\n")
    return digest.hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        sizes = meta["bytes"]
        if any((folder / name).stat().st_size != sizes[name] for name in {*_FILES, *sizes}):
            return False
        return TOKENIZER not in sizes or fingerprint((folder / TOKENIZER).read_bytes()) == meta["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path, corpus: Corpus, named: TextTokenizer | None, options: Text) -> None:
    """Fill a hidden folder beside ``folder`` and give it that name, unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = _hidden(folder)
    partial.mkdir()
    try:
        _fill(partial, corpus, named, options)
        try:
            partial.rename(folder)
        except OSError:
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, corpus: Corpus, named: TextTokenizer | None, options: Text) -> None:
    documents = text_documents(corpus)
    train, heldout = split_documents(documents, options.heldout)
    tokenizer = named or _made(folder, train, options.bpe_size)
    (folder / CACHE_TAG).write_text(_TAG, encoding="utf-8")
    num_tokens = {
        "train": _write_tokens(folder / "train.bin", train, tokenizer),
        "heldout": _write_tokens(folder / "heldout.bin", heldout, tokenizer),
    }
    for side, count in num_tokens.items():
        if not count:
            what = f"data.tokenizer: the {side} text of {corpus.root} gives no token at all."
            raise DataError(what, "Use another tokenizer or another text.")
    with (folder / "heldout.raw").open("wb") as raw:
        raw.writelines(piece for document in heldout for piece in pieces(document))
    meta = {
        "format": FORMAT,
        "source": str(corpus.root),
        "tokenizer": tokenizer.fingerprint,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "documents": {"train": len(train), "heldout": len(heldout), "skipped": len(corpus.files) - len(documents)},
        "tokens": num_tokens,
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _made(folder: Path, documents: Sequence[Document], vocab_size: int | None) -> TextTokenizer:
    """Return a tokenizer made from documents, the same ones first whatever else is there, and keep it in the folder."""
    assert vocab_size is not None
    mixed = sorted(documents, key=lambda document: _place(document.name))
    content = train_bpe((piece for document in mixed for piece in pieces(document)), vocab_size)
    (folder / TOKENIZER).write_bytes(content)
    return JsonTokenizer(content)


def _write_tokens(path: Path, documents: Sequence[Document], tokenizer: TextTokenizer) -> int:
    between = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=np.int64)
    with TokenWriter(path, vocab_size=tokenizer.vocab_size) as tokens:
        for number, document in enumerate(documents):
            if number:
                tokens.write(between)
            for piece in pieces(document):
                tokens.write(tokenizer.encode(piece))
    return tokens.num_tokens


def _remove(folder: Path) -> None:
    """Take what is damaged out of the way in one move, before another process can look at half of it."""
    aside = _hidden(folder)
    with suppress(FileNotFoundError):
        os.rename(folder, aside)
        shutil.rmtree(aside)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
