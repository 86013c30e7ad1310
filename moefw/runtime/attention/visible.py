"""Which scores of a rank's queries with the keys of each rank of cp are visible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from moefw.runtime.attention.kernels import Scores
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.sequence_cut import SequenceCut


class Block(NamedTuple):
    """Scores between some of this rank's queries and some keys of another rank."""

    queries: slice
    keys: slice
    scores: Scores
    blind_BHS: Tensor | None = None
    """bool: queries that see none of the keys. ``scores`` leaves them all, since kernels want one at least."""


@final
class Visible:
    """Blocks of visible scores. ``half`` is the length of a piece of :class:`SequenceCut`, of which a rank has two."""

    def __init__(self, cut: SequenceCut, mask: Mask, q_BHSd: Tensor, scale: float) -> None:
        self.cut, self.mask, self.scale, self.device = cut, mask, scale, q_BHSd.device
        length = q_BHSd.shape[2]
        self.half = length // 2
        self.places = slice(0, self.half), slice(self.half, length)

    def blocks(self, source: int) -> Iterator[Block]:
        """Yield the blocks of scores with the keys of a rank. With this rank's, each query's own key comes first."""
        front, back = self.places
        whole = self.mask.window is None or self.mask.window >= self.half * self.cut.unit
        if not whole or self.mask.documents_BS is not None:
            yield from self._by_pieces(source)
        elif source == self.cut.index:
            yield Block(slice(None), slice(None), Scores(self.scale, causal=True))
        elif source < self.cut.index:
            yield Block(slice(None), front, Scores(self.scale, causal=False))
        else:
            yield Block(back, slice(None), Scores(self.scale, causal=False))

    def _by_pieces(self, source: int) -> Iterator[Block]:
        """Yield a block for each pair of pieces with a visible score, those of a piece with itself first."""
        queries = zip(self.cut.pieces(self.cut.index), self.places, strict=True)
        keys = [*zip(self.cut.pieces(source), self.places, strict=True)]
        pairs = [(mine - other, mine, at, to) for mine, at in queries for other, to in keys]
        for apart, piece, at, to in sorted(pairs, key=lambda pair: pair[0]):
            nearest, farthest = max(0, (apart - 1) * self.half + 1), (apart + 1) * self.half - 1
            window = farthest + 1 if self.mask.window is None else self.mask.window
            if apart < 0 or nearest >= window:
                continue
            if farthest < window and self.mask.documents_BS is None:
                yield Block(at, to, Scores(self.scale, causal=apart == 0))
            else:
                yield self._masked(piece, at, piece - apart, to)

    def _masked(self, piece: int, queries: slice, other: int, keys: slice) -> Block:
        key_S = torch.arange(self.half, device=self.device)
        distance = (piece - other) * self.half + key_S.unsqueeze(1) - key_S
        visible = distance >= 0
        if self.mask.window is not None:
            visible = visible & (distance < self.mask.window)
        visible = visible.expand(1, 1, -1, -1)
        if self.mask.documents_BS is not None:
            pieces = self.mask.documents_BS.unflatten(1, (self.cut.unit, self.half))
            visible = visible & (pieces[:, None, piece, :, None] == pieces[:, None, other, None, :])
        blind_BHS = ~visible.any(-1)
        scores = Scores(self.scale, causal=False, visible_BHSS=visible | blind_BHS.unsqueeze(-1))
        return Block(queries, keys, scores, blind_BHS)
