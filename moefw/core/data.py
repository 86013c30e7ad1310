"""What a plugin of prepared data returns: streams of token ids, and the tokenizer that made them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class TokenStream(ABC):
    """One long sequence of token ids with document ends in it. ``name`` is what an error calls it: its file."""

    name: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return ``count`` token ids from ``start``, int64."""


class DataSource(ABC):
    """Prepared data: tokens to train on, tokens held out, and the tokenizer between text and ids.

    ``fingerprint`` is equal where equal ids stand for equal text; a checkpoint goes with it. ``digest`` is equal where
    both streams hold the same ids at the same positions, and stand for the same text: what ranks agree on. Of either,
    empty: nobody knows.
    """

    train: TokenStream
    heldout: TokenStream
    heldout_bytes: bytes
    vocab_size: int
    fingerprint: str = ""
    digest: str = ""

    @property
    def num_heldout_bytes(self) -> int:
        """How many bytes of text are held out; a source that knows without reading them says so here."""
        return len(self.heldout_bytes)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are no text become the replacement character."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write what reads and writes these ids, where it is a file, for those who have the model but not the data."""
