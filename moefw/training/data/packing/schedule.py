"""Which ranks compute which sequences of a step, in which micro-batch: arithmetic, the same on every rank.

All ranks wait for the busiest one in each micro-batch, since experts and shards of weights are shared by all. So long
sequences come first, each where the work of the busiest rank grows least.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from attrs import frozen

from moefw.core.site import Dims


@frozen(kw_only=True)
class Pack:
    """The numbers of the sequences that ``size`` neighbours on cp share; ``size`` divides the place of the first."""

    size: int
    sequences: tuple[int, ...] = ()


@frozen(kw_only=True)
class Room:
    """What ranks can hold: ``tokens`` a rank in a micro-batch. ``sizes``: how many ranks may share a pack, ascending.

    ``token_work``: the work of a token without attention, in scores between a query and a key.
    """

    dp: int
    cp: int
    tp: int
    tokens: int
    sizes: tuple[int, ...]
    token_work: float

    def unit(self, size: int) -> int:
        """Return the number of tokens of which a pack is a multiple."""
        return self.tp * (2 * size if size > 1 else 1)

    def padded(self, tokens: int, size: int) -> int:
        """Return the tokens of a pack with its padding."""
        return tokens + -tokens % self.unit(size)

    def work(self, length: int) -> float:
        """Return the work of a sequence, in scores."""
        return length * (length + 1) / 2 + length * self.token_work


def token_work(dims: Dims) -> float:
    """Return how many scores of attention cost as much as the products of a token, in a layer.

    A score costs 4 D FLOPs, with heads that are D wide together; a token 8 D^2 for the projections of attention and
    6 K D F for its experts.
    """
    return 2 * dims.model_dim + 1.5 * dims.top_k * dims.expert_dim


def schedule(lengths: Sequence[int], room: Room) -> list[list[list[Pack]]]:
    """Return the pack of each rank ``[micro-batch][dp][cp]``. A rank without sequences has an empty pack of its own.

    A sequence gets the fewest ranks whose tokens it fits into, and more while its work on each exceeds a multiple of a
    rank's fair share. Of several multiples, the one with the least work of the busiest ranks is taken. A pack of
    several ranks holds one sequence, unless all packs are of as many.
    """
    work = [room.work(length) for length in lengths]
    fewest = max(1, -(-sum(lengths) // (room.tokens * room.dp * room.cp)))
    fair = sum(work) / (fewest * room.dp * room.cp)
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    tried = []
    for most in (fair, 2 * fair, 4 * fair, inf) if len(room.sizes) > 1 else (inf,):
        ranks = _Ranks(room, fewest)
        for number in order:
            fitting = [size for size in room.sizes if room.padded(lengths[number], size) <= room.tokens * size]
            size = next((size for size in fitting if work[number] / size <= most), room.sizes[-1])
            ranks.give(number, lengths[number], work[number], size)
        tried.append(ranks)
    return min(tried, key=lambda ranks: ranks.busiest).packs


class _Ranks:
    """What ranks hold so far. Arrays are ``(micro-batches, dp, cp)``: the work of each rank, the tokens of its pack."""

    def __init__(self, room: Room, micro_batches: int) -> None:
        self.room, self.packs = room, list[list[list[Pack]]]()
        none = (0, room.dp, room.cp)
        self.work, self.tokens, self.size = np.zeros(none), np.zeros(none, np.int64), np.zeros(none, np.int64)
        self._open(micro_batches)

    @property
    def busiest(self) -> float:
        """The work of the busiest rank, summed over micro-batches."""
        return float(self.work.max((1, 2)).sum())

    def _open(self, count: int) -> None:
        """Add micro-batches of empty packs."""
        room = self.room
        self.work, self.tokens, self.size = (
            np.concatenate([known, np.zeros((count, room.dp, room.cp), known.dtype)])
            for known in (self.work, self.tokens, self.size)
        )
        self.packs += [[[Pack(size=1)] * room.cp for _ in range(room.dp)] for _ in range(count)]

    def give(self, number: int, length: int, work: float, size: int) -> None:
        """Give a sequence to the ``size`` neighbours on cp that have room where the busiest rank's work grows least."""
        blocks, unit = (*self.work.shape[:2], -1, size), self.room.unit(size)
        tokens = self.tokens.reshape(blocks).max(-1) + length
        taken = self.size.reshape(blocks)
        adds = (taken == size) & (self.room.sizes == (size,) or size == 1)
        fits = ((taken == 0) | adds).all(-1) & (tokens + -tokens % unit <= self.room.tokens * size)
        if not fits.any():
            self._open(1)
            self.give(number, length, work, size)
            return
        after = self.work.reshape(blocks).max(-1) + work / size
        growth = np.maximum(after - self.work.max((1, 2))[:, None, None], 0.0)
        best = np.lexsort((after[fits], growth[fits]))[0]
        batch, dp, block = np.argwhere(fits)[best].tolist()
        row, here = self.packs[batch][dp], slice(block * size, (block + 1) * size)
        row[here] = [Pack(size=size, sequences=(*row[here.start].sequences, number))] * size
        self.work[batch, dp, here], self.tokens[batch, dp, here] = after[batch, dp, block], tokens[batch, dp, block]
        self.size[batch, dp, here] = size
