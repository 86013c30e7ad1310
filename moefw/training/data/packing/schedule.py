"""Which ranks compute which sequences of a step, in which micro-batch: arithmetic, the same on every rank.

All ranks wait for the busiest one in each micro-batch, since experts and shards of weights are shared by all. So long
sequences come first, each where the work of the busiest rank grows least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

import numpy as np
from attrs import frozen

from moefw.core.site import Dims
from moefw.runtime.parallel.cp_blocks import pieces_of

EXCHANGE: Final = 0.1
"""The work to get a token's keys from another rank, over that of the token's products: with four heads of keys of 128,
as in Qwen3-30B-A3B, at 100 GB/s and 500 TFLOP/s."""

MULTIPLES: Final = (0, 1, 2, 4, inf)
"""Of a rank's fair share of work, beyond which a sequence gets more ranks."""


@frozen(kw_only=True)
class Pack:
    """The numbers of the sequences that ``size`` neighbours on cp share; ``size`` divides the place of the first."""

    size: int
    sequences: tuple[int, ...] = ()


@frozen(kw_only=True)
class Room:
    """What ranks can hold: ``tokens`` a rank in a micro-batch. ``sizes``: how many ranks may share a pack, ascending.

    ``tokens`` of as many ranks as share a pack are a multiple of :meth:`unit`.
    ``token_work``: the work of a token without attention, in scores between a query and a key.
    """

    dp: int
    cp: int
    tp: int
    tokens: int
    sizes: tuple[int, ...]
    token_work: float

    def work(self, lengths: Sequence[int], size: int) -> float:
        """Work of each rank for sequences that ``size`` ranks share: scores, products, keys of others."""
        per_token = self.token_work * (1 + EXCHANGE * (size - 1))
        return sum(length * (length + 1) / 2 + length * per_token for length in lengths) / size

    def unit(self, size: int) -> int:
        """Number of tokens of which a pack is a multiple: in parts for tp of the pieces of its ranks."""
        return self.tp * pieces_of(size)

    def padded(self, length: int, size: int) -> int:
        """Tokens of a sequence with its padding."""
        return length + -length % pieces_of(size)

    def held(self, lengths: Sequence[int], size: int) -> list[int]:
        """Tokens of each sequence of a pack with its padding. That of the pack is behind the last one."""
        padded = [self.padded(length, size) for length in lengths] or [0]
        padded[-1] += -sum(padded) % self.unit(size)
        return padded


def token_work(dims: Dims) -> float:
    """How many scores of attention cost as much as the products of a token, in a layer.

    A score costs 4 D FLOPs, with heads that are D wide together; a token 8 D^2 for the projections of attention and
    6 K D F for its experts.
    """
    return 2 * dims.model_dim + 1.5 * dims.top_k * dims.expert_dim


def schedule(lengths: Sequence[int], room: Room) -> list[list[list[Pack]]]:
    """Pack of each rank ``[micro-batch][dp][cp]``. A rank without sequences has an empty pack of its own.

    A sequence gets the fewest ranks whose tokens it fits into, and more while its work on each exceeds a multiple of a
    rank's fair share. Of several multiples, the one whose busiest ranks have the least work in all is taken. With none,
    all ranks of cp share all packs.
    """
    work = [room.work([length], 1) for length in lengths]
    fewest = max(1, -(-sum(lengths) // (room.tokens * room.dp * room.cp)))
    fair = sum(work) / (fewest * room.dp * room.cp)
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    fitting = [[size for size in room.sizes if room.padded(length, size) <= room.tokens * size] for length in lengths]

    def sizes(most: float) -> tuple[int, ...]:
        at_most = ((size for size in fitting[number] if work[number] / size <= most) for number in order)
        return tuple(next(size, room.sizes[-1]) for size in at_most)

    tried = []
    for chosen in dict.fromkeys(sizes(times * fair) for times in MULTIPLES):
        ranks = _Ranks(room, fewest)
        for number, size in zip(order, chosen, strict=True):
            ranks.give(number, lengths[number], size)
        tried.append(ranks)
    return min(tried, key=lambda ranks: ranks.busiest).packs


class _Ranks:
    """What ranks hold so far. Arrays are ``(micro-batches, dp, cp)``: the work of each rank, the tokens of its pack."""

    def __init__(self, room: Room, micro_batches: int) -> None:
        self.room = room
        self.packs: list[list[list[Pack]]] = []
        no_micro_batches = (0, room.dp, room.cp)
        self.work = np.zeros(no_micro_batches)
        self.tokens = np.zeros(no_micro_batches, np.int64)
        self.size = np.zeros(no_micro_batches, np.int64)
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

    def give(self, number: int, length: int, least: int) -> None:
        """Give a sequence to ``least`` free neighbours on cp, or to a pack of as many or more, that has room.

        The work of the busiest rank grows least there.
        """
        sizes = [size for size in self.room.sizes if size >= least]
        places = [place for size in sizes for place in self._places(length, size, least)]
        if not places:
            self._open(1)
            self.give(number, length, least)
            return
        _, after, size, batch, dp, first = min(places)
        row = self.packs[batch][dp]
        here = slice(first, first + size)
        row[here] = [Pack(size=size, sequences=(*row[first].sequences, number))] * size
        self.work[batch, dp, here] = after
        self.size[batch, dp, here] = size
        self.tokens[batch, dp, here] += self.room.padded(length, size)

    def _places(self, length: int, size: int, least: int) -> Iterator[tuple[float, float, int, int, int, int]]:
        """Yield the best place of a sequence in a pack of ``size`` ranks, if there is one.

        A place is: by how much the busiest rank's work grows, the work behind it, the size, and (micro-batch, dp, cp)
        of its first rank. Ranks that hold nothing yet are taken for the ``least`` size alone.
        """
        blocks = (*self.work.shape[:2], -1, size)
        # (micro-batches, dp, cp) -> (micro-batches, dp, blocks of ``size`` neighbours on cp)
        tokens = self.tokens.reshape(blocks).max(-1) + self.room.padded(length, size)
        taken = self.size.reshape(blocks)
        fits = ((taken == size) | ((taken == 0) & (size == least))).all(-1)
        fits &= tokens <= self.room.tokens * size
        if fits.any():
            after = self.work.reshape(blocks).max(-1) + self.room.work([length], size)
            growth = np.maximum(after - self.work.max((1, 2))[:, None, None], 0.0)
            best = np.lexsort((after[fits], growth[fits]))[0]
            batch, dp, block = np.argwhere(fits)[best].tolist()
            yield float(growth[batch, dp, block]), float(after[batch, dp, block]), size, batch, dp, block * size
