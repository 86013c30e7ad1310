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
    """bool: queries that see none of the keys. In ``scores`` they see all, since kernels need one at least."""


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
        self.cut = cut
        self.mask = mask
        self.scale = scale
        self.device = q_BHSd.device
        # With lengths, each document is a part of its own, so there is none to mask within one.
        self.documents_BS = None if mask.lengths else mask.documents_BS
        self.parts: list[Part] = []
        begin = 0
        for length in mask.lengths or (q_BHSd.shape[2] * cut.size,):
            half = length // cut.unit
            middle = begin + half
            end = middle + half
            self.parts.append(Part(slice(begin, middle), slice(middle, end), half))
            begin = end

    def blocks(self, source: int) -> Iterator[Block]:
        """Yield the blocks of scores with the keys of a rank. With this rank's, each query's own key comes first."""
        for part in self.parts:
            sees_all_before = self.mask.window is None or self.mask.window >= part.half * self.cut.unit
            if not sees_all_before or self.documents_BS is not None:
                yield from self._by_pieces(source, part)
            # A rank has a piece of the front and one as far from the back. The front of a rank before this one lies
            # before both of this rank's pieces, its back behind both; the pieces of a rank behind lie between them.
            elif source == self.cut.index:
                yield Block(part.whole, part.whole, Scores(self.scale, causal=True))
            elif source < self.cut.index:
                yield Block(part.whole, part.front, Scores(self.scale, causal=False))
            else:
                yield Block(part.back, part.whole, Scores(self.scale, causal=False))

    def _by_pieces(self, source: int, part: Part) -> Iterator[Block]:
        """Yield a block for each pair of pieces with a visible score, those of a piece with itself first."""
        half = part.half
        positions = (part.front, part.back)
        own_pieces = [*zip(self.cut.pieces(self.cut.index), positions, strict=True)]
        source_pieces = [*zip(self.cut.pieces(source), positions, strict=True)]
        pairs = [
            (query_piece - key_piece, query_piece, queries, keys)
            for query_piece, queries in own_pieces
            for key_piece, keys in source_pieces
        ]
        for apart, query_piece, queries, keys in sorted(pairs, key=_apart):
            # The distances of a query of one piece to the keys of a piece ``apart`` before it; none is negative.
            nearest = max(0, (apart - 1) * half + 1)
            farthest = (apart + 1) * half - 1
            window = farthest + 1 if self.mask.window is None else self.mask.window
            if apart < 0 or nearest >= window:
                continue
            if farthest < window and self.documents_BS is None:
                yield Block(queries, keys, Scores(self.scale, causal=apart == 0))
            else:
                yield self._masked(query_piece, queries, query_piece - apart, keys, half)

    def _masked(self, query_piece: int, queries: slice, key_piece: int, keys: slice, half: int) -> Block:
        """Block of two pieces with a mask of what the window and documents leave visible."""
        key_S = torch.arange(half, device=self.device)
        distance = (query_piece - key_piece) * half + key_S.unsqueeze(1) - key_S
        visible = distance >= 0
        if self.mask.window is not None:
            visible = visible & (distance < self.mask.window)
        visible = visible.expand(1, 1, -1, -1)
        if self.documents_BS is not None:
            pieces = self.documents_BS.unflatten(1, (self.cut.unit, half))
            of_queries = pieces[:, None, query_piece, :, None]
            of_keys = pieces[:, None, key_piece, None, :]
            visible = visible & (of_queries == of_keys)
        blind_BHS = ~visible.any(-1)
        scores = Scores(self.scale, causal=False, visible_BHSS=visible | blind_BHS.unsqueeze(-1))
        return Block(queries, keys, scores, blind_BHS)


def _apart(pair: tuple[int, int, slice, slice]) -> int:
    return pair[0]
