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


class Part(NamedTuple):
    """Where this rank's two pieces of a sequence are among its positions. A piece has ``half`` of them."""

    front: slice
    back: slice
    half: int

    @property
    def whole(self) -> slice:
        """Both pieces."""
        return slice(self.front.start, self.back.stop)


@final
class Visible:
    """Blocks of visible scores: of each sequence of a row, between pieces of :class:`SequenceCut`."""

    def __init__(self, cut: SequenceCut, mask: Mask, q_BHSd: Tensor, scale: float) -> None:
        self.cut, self.mask, self.scale, self.device = cut, mask, scale, q_BHSd.device
        self.documents_BS = None if mask.lengths else mask.documents_BS
        self.parts, begin = list[Part](), 0
        for length in mask.lengths or (q_BHSd.shape[2] * cut.size,):
            half = length // cut.unit
            middle, end = begin + half, begin + 2 * half
            self.parts.append(Part(slice(begin, middle), slice(middle, end), half))
            begin = end

    def blocks(self, source: int) -> Iterator[Block]:
        """Yield the blocks of scores with the keys of a rank. With this rank's, each query's own key comes first."""
        for part in self.parts:
            whole = self.mask.window is None or self.mask.window >= part.half * self.cut.unit
            if not whole or self.documents_BS is not None:
                yield from self._by_pieces(source, part)
            elif source == self.cut.index:
                yield Block(part.whole, part.whole, Scores(self.scale, causal=True))
            elif source < self.cut.index:
                yield Block(part.whole, part.front, Scores(self.scale, causal=False))
            else:
                yield Block(part.back, part.whole, Scores(self.scale, causal=False))

    def _by_pieces(self, source: int, part: Part) -> Iterator[Block]:
        """Yield a block for each pair of pieces with a visible score, those of a piece with itself first."""
        half, places = part.half, (part.front, part.back)
        queries = zip(self.cut.pieces(self.cut.index), places, strict=True)
        keys = [*zip(self.cut.pieces(source), places, strict=True)]
        pairs = [(mine - other, mine, at, to) for mine, at in queries for other, to in keys]
        for apart, piece, at, to in sorted(pairs, key=lambda pair: pair[0]):
            nearest, farthest = max(0, (apart - 1) * half + 1), (apart + 1) * half - 1
            window = farthest + 1 if self.mask.window is None else self.mask.window
            if apart < 0 or nearest >= window:
                continue
            if farthest < window and self.documents_BS is None:
                yield Block(at, to, Scores(self.scale, causal=apart == 0))
            else:
                yield self._masked(piece, at, piece - apart, to, half)

    def _masked(self, piece: int, queries: slice, other: int, keys: slice, half: int) -> Block:
        key_S = torch.arange(half, device=self.device)
        distance = (piece - other) * half + key_S.unsqueeze(1) - key_S
        visible = distance >= 0
        if self.mask.window is not None:
            visible = visible & (distance < self.mask.window)
        visible = visible.expand(1, 1, -1, -1)
        if self.documents_BS is not None:
            pieces = self.documents_BS.unflatten(1, (self.cut.unit, half))
            visible = visible & (pieces[:, None, piece, :, None] == pieces[:, None, other, None, :])
        blind_BHS = ~visible.any(-1)
        scores = Scores(self.scale, causal=False, visible_BHSS=visible | blind_BHS.unsqueeze(-1))
        return Block(queries, keys, scores, blind_BHS)
