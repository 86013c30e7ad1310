"""Which windows of a blend a step sees: a pure function of seed and step, as for a single source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from moefw.core.data import DataSource
from moefw.core.errors import DataError
from moefw.plugins.data.blend.proportions import pattern
from moefw.plugins.data.blend.source import BlendSource
from moefw.training.data.order import BatchOrder


@frozen(kw_only=True)
class BlendOrder:
    """The training order over sources that stand end to end in one stream, each from ``begins[i]`` on.

    ``weights`` are whole numbers: see :func:`pattern`. ``begin`` shifts all steps, as in :class:`BatchOrder`.
    """

    sources: tuple[BatchOrder, ...]
    begins: tuple[int, ...]
    weights: tuple[int, ...]
    sequences_per_step: int
    begin: int = 0

    def first(self, step: int) -> int:
        """How many sequences come before ``step`` (from 0)."""
        return self.begin + step * self.sequences_per_step

    def starts(self, step: int) -> NDArray[np.int64]:
        """Where the windows of ``step`` (from 0) start: ``(sequences_per_step,)``, int64."""
        first = self.first(step)
        repeated = pattern(self.weights)
        times, rest = divmod(first, len(repeated))
        source_B = repeated[np.arange(rest, rest + self.sequences_per_step) % len(repeated)]
        starts_B = np.empty(self.sequences_per_step, dtype=np.int64)
        for index, (order, weight) in enumerate(zip(self.sources, self.weights, strict=True)):
            mine_B = source_B == index
            before = times * weight + int((repeated[:rest] == index).sum())
            starts_B[mine_B] = self.begins[index] + order.windows(before, int(mine_B.sum()))
        return starts_B


def training_order(data: DataSource, *, seq_len: int, sequences_per_step: int, seed: int) -> BatchOrder | BlendOrder:
    """Training order over prepared data. Raises DataError if a source has less than one window."""

    def order(num_tokens: int, seed: int) -> BatchOrder:
        return BatchOrder(num_tokens=num_tokens, seq_len=seq_len, sequences_per_step=sequences_per_step, seed=seed)

    if not isinstance(data, BlendSource):
        return order(len(data.train), seed)
    sources = []
    for index, stream in enumerate(data.train.streams):
        with _part(index):
            sources.append(order(len(stream), seed + index))
    return BlendOrder(
        sources=tuple(sources),
        begins=tuple(data.train.begins),
        weights=data.weights,
        sequences_per_step=sequences_per_step,
    )


@contextmanager
def _part(index: int) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        (problem,) = error.problems
        raise DataError(f"data.parts[{index}]: {problem.what}", problem.fix) from error
