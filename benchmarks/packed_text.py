"""Documents of mixed length, and packs of them for :func:`moefw.testing.training.short_run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moefw.compose.assembly import Assembly
from moefw.core.contracts import Layout
from moefw.core.data import TokenStream
from moefw.core.stages import Batch
from moefw.training.data.packing.sequences import sequence_order
from moefw.training.feed import Packs

MIXED = (3, 17, 2, 33, 5, 1, 9, 41, 4, 6, 25, 2, 12, 70, 7, 3) * 20
"""Tokens of documents. A single token predicts nothing."""


class Documents(TokenStream):
    """Documents of these lengths, with random tokens."""

    name = "documents"

    def __init__(self, vocab_size: int, lengths: Sequence[int] = MIXED) -> None:
        self.starts = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
        self.ids = np.random.default_rng(0).integers(0, vocab_size, sum(lengths))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``count`` token ids from ``start``."""
        return self.ids[start : start + count]

    def document_starts(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where documents start."""
        return self.starts[(self.starts >= start) & (self.starts < start + count)]


def read_packs(assembly: Assembly, layout: Layout, lengths: Sequence[int] = MIXED) -> Callable[[int], list[Batch]]:
    """Function of the step that reads this rank's packs, as micro-batches."""
    model: Any = assembly.parts.model
    train = assembly.spec.train
    data: Any = SimpleNamespace(train=Documents(model.vocab_size, lengths), vocab_size=model.vocab_size)
    session: Any = SimpleNamespace(assembly=assembly, layout=layout, data=data, device=torch.device("cpu"))
    sizes = {"seq_len": train.seq_len, "sequences_per_step": train.tokens_per_step // train.seq_len}
    packs = Packs(session, sequence_order(data, seed=assembly.spec.run.seed, **sizes))
    return lambda step: list(packs.micro_batches(step))
