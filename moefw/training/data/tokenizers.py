"""Between text and token ids."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from moefw.core.errors import DataError

END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""What tokenizers call the token that ends a document, the likelier names first."""


class TextTokenizer(ABC):
    """Turns UTF-8 text into ids below ``vocab_size`` and back.

    ``fingerprint`` is equal for tokenizers that yield equal ids. ``separator`` is the id between two documents,
    or None if the vocabulary has none. ``content`` is what a ``tokenizer.json`` of it holds, None for bytes.
    """

    fingerprint: str
    vocab_size: int
    separator: int | None
    content: bytes | None = None

    @abstractmethod
    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Return the ids of UTF-8 text, one axis; nothing is added at its ends."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


@final
class ByteTokenizer(TextTokenizer):
    """A byte is an id. Documents are separated by byte 0, which text does not contain."""

    fingerprint = "bytes"
    vocab_size = 256
    separator = 0

    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Return the bytes, uint8, without a copy."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; what is no UTF-8, or no byte at all, becomes the replacement character."""
        never_utf8 = 0xFF
        return bytes(id if 0 <= id < 256 else never_utf8 for id in ids).decode("utf-8", "replace")


@final
class JsonTokenizer(TextTokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` library. ``content`` is the file's; raises ValueError if it is none.

    The names of special tokens are ordinary text where they stand in a document, so that no document can end
    another; the file's truncation and padding, meant for training on single sentences, are switched off.
    """

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError("its vocabulary is empty")
        self.content = content
        self.fingerprint = fingerprint(content)
        self.vocab_size = max(ids.values()) + 1
        self.separator = next((ids[name] for name in END_OF_TEXT if name in ids), None)

    def encode(self, text: bytes) -> NDArray[np.integer[Any]]:
        """Return the ids, int64."""
        (encoding,) = self._tokenizer.encode_batch_fast([text.decode("utf-8", "replace")], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens by their names; ids past the vocabulary are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def fingerprint(content: bytes) -> str:
    """Return that of a ``tokenizer.json``."""
    return f"tokenizer.json {hashlib.sha256(content).hexdigest()}"


def load_tokenizer(name: str) -> TextTokenizer:
    """Return the tokenizer that ``data.tokenizer`` names if it is not made from the text: ``bytes``, or a path."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    fix = "Use bytes, bpe-2048 (or another number of ids), or the path of a tokenizer.json."
    try:
        return JsonTokenizer(path.read_bytes())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(f"data.tokenizer: {name!r} cannot be read: {reason}.", fix) from error
    except ValueError as error:
        raise DataError(f"data.tokenizer: {name!r} is not a tokenizer.json: {error}.", fix) from error
