"""Documents of mixed length, and what reads packs of them for a short run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moefw import Batch, TokenStream
from moefw.compose.assembly import Assembly
from moefw.core.contracts import Layout
from moefw.training.data.packing.sequences import sequence_order
from moefw.training.feed import Packs

LENGTHS = (3, 17, 2, 33, 5, 1, 9, 41, 4, 6, 25, 2, 12, 70, 7, 3)
"""Tokens of each document. One has 70, more than a sequence; one has a single token, which predicts nothing."""


class Documents(TokenStream):
    """Documents of these lengths, twenty times, with tokens that depend on the position."""

    name = "documents"

    def __init__(self, vocab_size: int) -> None:
        lengths = np.tile(LENGTHS, 20)
        self.starts = lengths.cumsum() - lengths
        self.ids = np.random.default_rng(0).integers(0, vocab_size, lengths.sum())

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return ids."""
        return self.ids[start : start + count]

    def document_starts(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return where documents start."""
        return self.starts[(self.starts >= start) & (self.starts < start + count)]


def read_packs(assembly: Assembly, layout: Layout) -> Callable[[int], list[Batch]]:
    """Return what reads this rank's packs of a step."""
    model: Any = assembly.parts.model
    train = assembly.spec.train
    data: Any = SimpleNamespace(train=Documents(model.vocab_size), vocab_size=model.vocab_size)
    session: Any = SimpleNamespace(assembly=assembly, layout=layout, data=data, device=torch.device("cpu"))
    order = sequence_order(
        data, seq_len=train.seq_len, sequences_per_step=train.tokens_per_step // train.seq_len, seed=1
    )
    packs = Packs(session, order)
    return lambda step: list(packs.micro_batches(step))
