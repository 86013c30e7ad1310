"""Prepared data, which data-source plugins return: streams of token ids, and the tokenizer that made them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

TOKENIZER: Final = "tokenizer.json"
"""The name of a file that holds a tokenizer."""


class TokenStream(ABC):
    """One long sequence of token ids: documents, one after another. ``name`` identifies it in errors: its file."""

    name: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """Number of tokens."""

    @abstractmethod
    def read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``count`` token ids from ``start``, int64."""

    def document_starts(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Positions of the tokens that start a document, of ``count`` from ``start``; ascending, int64.

        What separates two documents belongs to the first. None: the stream does not know.
        """
        return None

    def trained(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Whether each of ``count`` tokens from ``start`` is one to predict, such as those of answers; bool.

        Other tokens, such as those of prompts, are read, routed and seen like these, and have no loss. None, whatever
        the range: all tokens of the stream are to be predicted.
        """
        return None


class DataSource(ABC):
    """Prepared data: tokens to train on, tokens held out, and the tokenizer between text and ids.

    Sources with one ``fingerprint`` map equal ids to equal text; a checkpoint belongs to a fingerprint. Sources with
    one ``digest`` have the same ids at the same positions in both streams, and the same text; ranks must agree on it.
    Either is empty if unknown.
    """

    train: TokenStream
    heldout: TokenStream
    heldout_bytes: bytes
    vocab_size: int
    fingerprint: str = ""
    digest: str = ""

    @property
    def num_heldout_bytes(self) -> int:
        """Number of bytes of held-out text. Override this if the number is known without reading the text."""
        return len(self.heldout_bytes)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Bytes that are not text become the replacement character."""

    def ask(self, question: str) -> list[int] | None:
        """Token ids of a conversation up to the answer to ``question``; None: the source has no conversations."""
        return None

    @property
    def ends(self) -> frozenset[int]:
        """Token ids with which a generated text ends, such as that behind an answer; empty: none is known."""
        return frozenset()

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, if it is a file, to ``folder``, for use of the model without the data."""

    def preview(self) -> Sequence[str]:
        """Lines that a run shows before its first step, such as a sample with the tokens to predict marked."""
        return ()
