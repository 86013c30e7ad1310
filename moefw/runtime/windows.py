"""Reads windows of a token stream and checks their ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefw.core.data import TokenStream
from moefw.core.errors import ContractError, DamagedDataError


def read_windows(stream: TokenStream, starts: Iterable[int], *, seq_len: int, vocab_size: int) -> NDArray[np.int64]:
    """Windows of ``seq_len + 1`` ids at ``starts``: ``(B, seq_len + 1)``, int64.

    Raises DamagedDataError if an id is outside the vocabulary, and ContractError if the stream returns no ids.
    """
    return np.stack([read_ids(stream, int(start), seq_len + 1, vocab_size) for start in starts])


def number_documents(stream: TokenStream, starts: Iterable[int], *, seq_len: int) -> NDArray[np.int64]:
    """Number of each token's document in the windows at ``starts``: ``(B, seq_len + 1)``, int64, ascending.

    Raises ContractError if the stream does not know where documents start.
    """
    return np.stack([_numbers(stream, int(start), seq_len + 1) for start in starts])


def _numbers(stream: TokenStream, start: int, count: int) -> NDArray[np.int64]:
    places: Any = stream.document_starts(start, count)
    known = isinstance(places, np.ndarray) and places.ndim == 1 and places.dtype == np.int64
    if not known or ((places < start) | (places >= start + count)).any():
        name = stream.name or type(stream).__name__
        what = f"{name}: document_starts({start}, {count}) returned {places!r}, not positions of this range, int64."
        raise ContractError(what, "This is a fault of the data source.")
    numbers: NDArray[np.int64] = np.bincount(places - start, minlength=count).cumsum()
    return numbers


def masks_losses(stream: TokenStream) -> bool:
    """Whether a stream has tokens that are read, and not trained on."""
    return stream.trained(0, 1) is not None


def read_loss_masks(stream: TokenStream, starts: Iterable[int], *, seq_len: int) -> NDArray[np.bool_] | None:
    """Whether the label of each token is trained on in the windows at ``starts``: ``(B, seq_len)``; None: all are.

    Raises ContractError if the stream returns something else than masks.
    """
    if not masks_losses(stream):
        return None
    return np.stack([read_trained(stream, int(start) + 1, seq_len) for start in starts])  # a label is the token behind


def read_trained(stream: TokenStream, start: int, count: int) -> NDArray[np.bool_]:
    """Whether each of ``count`` tokens from ``start`` is one to predict, of a stream that masks losses.

    Raises ContractError if the stream returns something else.
    """
    trained: Any = stream.trained(start, count)
    if isinstance(trained, np.ndarray) and trained.shape == (count,) and trained.dtype == np.bool_:
        return trained
    returned = f"{trained.dtype} {trained.shape}" if isinstance(trained, np.ndarray) else repr(trained)
    name = stream.name or type(stream).__name__
    what = f"{name}: trained({start}, {count}) returned {returned}, not {count} values, bool."
    raise ContractError(what, "This is a fault of the data source.")


def read_ids(stream: TokenStream, start: int, count: int, vocab_size: int) -> NDArray[np.int64]:
    """``count`` ids from ``start``, int64; at least one. Raises as :func:`read_windows` does."""
    ids = stream.read(start, count)
    name = stream.name or type(stream).__name__
    if not isinstance(ids, np.ndarray) or ids.shape != (count,) or ids.dtype != np.int64:
        returned = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        what = f"{name}: read({start}, {count}) returned {returned}, not {count} ids, int64."
        raise ContractError(what, "This is a fault of the data source.")
    if ids.min() < 0 or ids.max() >= vocab_size:
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        what = f"{name} holds the id {ids[at]} at token {start + at:,}, and the vocabulary has {vocab_size:,} ids."
        raise DamagedDataError(what, "Prepare the data anew, with the tokenizer that is used with it.")
    return ids
