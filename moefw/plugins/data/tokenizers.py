"""Conversion between text and token ids."""

from __future__ import annotations

import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from moefw.core.errors import DataError, os_reason
from moefw.plugins.data.encoding import EncodingProcess
from moefw.system.untrusted_files import read_regular

END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Names of the token that ends a document, the likelier ones first."""
MAX_BYTES: Final = 1 << 28
"""256 MiB, ten times the size of the tokenizers with the largest vocabularies."""
_FIX = "Use bytes, bpe-2048 (or another number of ids), or the path of a tokenizer.json."


class TextTokenizer(ABC):
    """Turns UTF-8 text into ids below ``vocab_size`` and back.

    ``fingerprint`` is equal for tokenizers that yield equal ids. ``separator`` is the id between two documents,
    or None if the vocabulary has none. ``content`` is the content of its ``tokenizer.json``, None for bytes.
    ``parts_after_words``: a cut between a word and the white space after it does not change the ids.
    """

    fingerprint: str
    vocab_size: int
    separator: int | None
    content: bytes | None = None
    parts_after_words: bool

    @abstractmethod
    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Ids of UTF-8 text, one axis; nothing is added at its ends. Raises ValueError if it fails."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Raises ValueError if it fails."""


@final
class ByteTokenizer(TextTokenizer):
    """Uses bytes as ids. Documents are separated by byte 0, which text does not contain."""

    fingerprint = "bytes"
    vocab_size = 256
    separator = 0
    parts_after_words = True

    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Bytes, uint8, without a copy."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Text; invalid UTF-8, and ids that are no byte, become the replacement character."""
        never_utf8 = 0xFF
        return bytes(id if 0 <= id < 256 else never_utf8 for id in ids).decode("utf-8", "replace")


@final
class JsonTokenizer(TextTokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` library. ``content`` is the file's; raises ValueError if it is none.

    ``process`` runs it; None: one that starts with the first use, and ends with this tokenizer. Names of special tokens
    inside a document are ordinary text, so that no document can end another. The file's truncation and padding, meant
    for training on single sentences, are switched off.
    """

    content: bytes

    def __init__(self, content: bytes, process: EncodingProcess | None = None) -> None:
        from tokenizers import Tokenizer

        with _failures_told():
            tokenizer = Tokenizer.from_buffer(content)
            ids = tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError("its vocabulary is empty")
        self.content = content
        self.fingerprint = fingerprint(content)
        self.vocab_size = max(ids.values()) + 1
        self.separator = next((ids[name] for name in END_OF_TEXT if name in ids), None)
        self.parts_after_words = _splits_like_gpt2(tokenizer)
        self._given_process = process

    @cached_property
    def _process(self) -> EncodingProcess:
        if self._given_process is not None:
            return self._given_process
        process = EncodingProcess(self.content)
        weakref.finalize(self, process.close)
        return process

    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Ids, uint32."""
        with _failures_told():
            (ids,) = self._process.encode([text])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens by their names; ids past the vocabulary are left out."""
        with _failures_told():
            return self._process.decode(ids)


@contextmanager
def _failures_told() -> Iterator[None]:
    """Raise the library's errors as ValueError, including a Rust panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from error


def _splits_like_gpt2(tokenizer: Any) -> bool:
    """Whether GPT-2's pattern, and nothing else, splits text into words before it is encoded.

    A match of that pattern with characters other than white space ends where white space begins, and no match depends
    on the text before it. So text may be cut where white space begins.
    """
    from tokenizers import pre_tokenizers

    splitter = tokenizer.pre_tokenizer
    return (
        tokenizer.normalizer is None
        and isinstance(splitter, pre_tokenizers.ByteLevel)
        and not splitter.add_prefix_space
        and splitter.use_regex
        and all(token.special for token in tokenizer.get_added_tokens_decoder().values())
    )


def fingerprint(content: bytes) -> str:
    """Fingerprint of a ``tokenizer.json``."""
    return f"tokenizer.json {hashlib.sha256(content).hexdigest()}"


def read_tokenizer(name: str) -> bytes | None:
    """Content of the tokenizer.json that ``data.tokenizer`` names; None for ``bytes``. Raises DataError."""
    if name == "bytes":
        return None
    try:
        return read_json(Path(os.path.expanduser(name)))
    except OSError as error:
        reason = os_reason(error)
        raise DataError(f"data.tokenizer: {name!r} cannot be read: {reason}.", _FIX) from error


def read_json(path: Path) -> bytes:
    """Content of what may be a ``tokenizer.json``. Raises OSError, also if it is too large or no regular file."""
    return read_regular(path, max_bytes=MAX_BYTES)


def load_tokenizer(name: str, content: bytes | None, process: EncodingProcess | None = None) -> TextTokenizer:
    """Tokenizer that ``data.tokenizer`` names, from its file's content: None for bytes. Raises DataError.

    A file that this process has not made must first run in an :class:`EncodingProcess`, which it may crash.
    ``process``: as in :class:`JsonTokenizer`.
    """
    try:
        return ByteTokenizer() if content is None else JsonTokenizer(content, process)
    except ValueError as error:
        raise not_a_tokenizer(name, str(error)) from error


def not_a_tokenizer(name: str, reason: str) -> DataError:
    """Error for a file that data.tokenizer names and that cannot be used."""
    return DataError(f"data.tokenizer: {name!r} is not a tokenizer.json: {reason}.", _FIX)
