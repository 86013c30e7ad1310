"""Documents as sequences, and which of them a step sees: a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import DataError
from moefw.plugins.data.blend.source import BlendSource
from moefw.training.data.order import epoch_order

Ints = NDArray[np.int64]


@frozen(kw_only=True)
class Sequences:
    """Sequences of ``lengths_N`` tokens that predict the token behind each, from ``starts_N`` of a stream on.

    ``numbers_N`` is unique to a sequence within a run.
    """

    starts_N: Ints
    lengths_N: Ints
    numbers_N: Ints


@frozen(kw_only=True)
class SourceOrder:
    """The sequences of one source: each epoch shows each once, in an order drawn for that epoch."""

    starts_N: Ints
    lengths_N: Ints
    seed: int
    _tokens: int = field(init=False, eq=False, repr=False)
    _epoch: Callable[[int], tuple[Ints, Ints]] = field(init=False, eq=False, repr=False)

    @_tokens.default
    def _in_an_epoch(self) -> int:
        return int(self.lengths_N.sum())

    @_epoch.default
    def _cached(self) -> Callable[[int], tuple[Ints, Ints]]:
        return lru_cache(maxsize=2)(self._drawn)

    def _drawn(self, epoch: int) -> tuple[Ints, Ints]:
        """Sequences of an epoch in their order, and how many tokens come before each."""
        order, _ = epoch_order(self.seed, epoch, len(self.starts_N))
        lengths_N = self.lengths_N[order]
        return order, lengths_N.cumsum() - lengths_N

    def _number(self, position: int) -> int:
        """Number of the first sequence that starts at token ``position`` of the order or later."""
        epoch, rest = divmod(position, self._tokens)
        return epoch * len(self.starts_N) + int(np.searchsorted(self._epoch(epoch)[1], rest))

    def between(self, first: int, end: int) -> Sequences:
        """Sequences that start at tokens ``first`` to ``end`` of the order, without ``end``."""
        numbers_N = np.arange(self._number(first), self._number(end))
        epoch_N, place_N = np.divmod(numbers_N, len(self.starts_N))
        chosen_N = place_N.copy()
        for epoch in np.unique(epoch_N):
            here_N = epoch_N == epoch
            chosen_N[here_N] = self._epoch(int(epoch))[0][place_N[here_N]]
        return Sequences(starts_N=self.starts_N[chosen_N], lengths_N=self.lengths_N[chosen_N], numbers_N=numbers_N)


@frozen(kw_only=True)
class SequenceOrder:
    """The training order over sources, each of which gives its part of ``weights`` of the tokens of a step.

    A step has ``sequences_per_step * seq_len`` tokens on average. ``begin`` shifts all steps, in sequences of
    ``seq_len`` tokens: see :class:`moefw.training.data.order.BatchOrder`.
    """

    sources: tuple[SourceOrder, ...]
    weights: tuple[int, ...]
    seq_len: int
    sequences_per_step: int
    begin: int = 0

    def first(self, step: int) -> int:
        """How many sequences of ``seq_len`` tokens come before ``step`` (from 0)."""
        return self.begin + step * self.sequences_per_step

    def sequences(self, step: int) -> Sequences:
        """Sequences of ``step`` (from 0)."""
        ends = [self.first(at) * self.seq_len for at in (step, step + 1)]
        total = sum(self.weights)
        count = len(self.sources)
        by_source: list[Sequences] = []
        for index, (source, weight) in enumerate(zip(self.sources, self.weights, strict=True)):
            sequences = source.between(*(end * weight // total for end in ends))
            # Numbers of sources are interleaved, so that no two sequences of a run have one number, hence one seed.
            by_source.append(evolve(sequences, numbers_N=sequences.numbers_N * count + index))
        return Sequences(
            starts_N=np.concatenate([sequences.starts_N for sequences in by_source]),
            lengths_N=np.concatenate([sequences.lengths_N for sequences in by_source]),
            numbers_N=np.concatenate([sequences.numbers_N for sequences in by_source]),
        )


def sequence_order(data: DataSource, *, seq_len: int, sequences_per_step: int, seed: int) -> SequenceOrder:
    """Training order over documents. Raises DataError if a source has none with two tokens."""
    parts: list[tuple[TokenStream, int]] = [(data.train, 0)]
    weights: tuple[int, ...] = (1,)
    if isinstance(data, BlendSource):
        parts = [*zip(data.train.streams, data.train.begins, strict=True)]
        weights = data.weights
    sources = []
    for index, (stream, begin) in enumerate(parts):
        starts_N, lengths_N = document_parts(stream, seq_len)
        if not len(starts_N):
            where = f"data.parts[{index}]: " if len(parts) > 1 else ""
            raise DataError(f"{where}the training text has no document of two tokens.", "Use more text.")
        sources.append(SourceOrder(starts_N=starts_N + begin, lengths_N=lengths_N, seed=seed + index))
    return SequenceOrder(
        sources=tuple(sources),
        weights=weights,
        seq_len=seq_len,
        sequences_per_step=sequences_per_step,
    )


def document_parts(stream: TokenStream, seq_len: int) -> tuple[Ints, Ints]:
    """Start and length of the sequences of a stream: its documents, longer ones in parts of ``seq_len``.

    Each predicts the token behind its tokens, of the same document; so a document of n tokens gives n - 1, and a single
    token none.
    """
    starts = stream.document_starts(0, len(stream))
    assert starts is not None, "streams that do not know their documents are refused before"
    starts_N = starts if starts[:1].tolist() == [0] else np.concatenate([[0], starts])
    tokens_N = np.diff(starts_N, append=len(stream)) - 1
    parts_N = -(-tokens_N // seq_len)
    first_N = (parts_N.cumsum() - parts_N).repeat(parts_N)
    offset_N = (np.arange(parts_N.sum()) - first_N) * seq_len
    return starts_N.repeat(parts_N) + offset_N, np.minimum(tokens_N.repeat(parts_N) - offset_N, seq_len)
