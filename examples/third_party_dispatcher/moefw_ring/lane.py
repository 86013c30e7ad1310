"""One direction around the ring: rows go out hop by hop, and sums of rows return along the same way.

Out and back are dual: a movement that copies a row to several ranks in forward adds their gradients in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, final

import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.runtime.communication.movement import Work

Round = list[Work]
"""Works that run at the same time: one hop of every lane."""


@frozen(kw_only=True, eq=False)
class Lane:
    """One direction of the ring: each rank passes rows to the rank ``step`` further (1 or -1), ``hops`` times.

    The first ``rows[rank][hop]`` rows of ``rank`` make that hop, so that the rows that go on are a slice.
    """

    group: ProcessGroup
    rank: int
    step: int
    rows: Sequence[Sequence[int]]

    @property
    def hops(self) -> range:
        """Numbers of the hops."""
        return range(len(self.rows[0]))

    @property
    def leaving(self) -> list[int]:
        """Number of rows that leave this rank in each hop: first its own, then those of the previous hop."""
        return [self._rows_of(hop)[hop] for hop in self.hops]

    @property
    def arriving(self) -> list[int]:
        """Number of rows that arrive at this rank in each hop."""
        return [self._rows_of(hop + 1)[hop] for hop in self.hops]

    def _rows_of(self, distance: int) -> Sequence[int]:
        return self.rows[(self.rank - self.step * distance) % len(self.rows)]

    def out(self, sent: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[Round]:
        """Fill ``buffers`` with the arriving rows, in order of hops. Each rank passes on the rows needed further on."""
        carried = list(sent)
        pieces = [buffer.split(self.arriving) for buffer in buffers]
        for hop in self.hops:
            into = [piece[hop] for piece in pieces]
            yield [
                self._pass(rows[: self.leaving[hop]], buffer, self.step)
                for rows, buffer in zip(carried, into, strict=True)
            ]
            carried = into

    def back(self, sent: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[Round]:
        """Fill ``buffers`` with the sums of the rows of each token; ``sent`` is in order of hops."""
        pieces = [tensor.split(self.arriving) for tensor in sent]
        carried = [piece[-1] for piece in pieces]
        for hop in reversed(self.hops):
            into = list(buffers) if hop == 0 else [rows.new_empty(self.leaving[hop], *rows.shape[1:]) for rows in sent]
            yield [self._pass(rows, buffer, -self.step) for rows, buffer in zip(carried, into, strict=True)]
            if hop:
                carried = [_added(piece[hop - 1], more) for piece, more in zip(pieces, into, strict=True)]

    def _pass(self, rows: Tensor, into: Tensor, step: int) -> Work:
        """Start sending rows to one neighbour and receiving others from the other neighbour."""
        sent = self._peers(len(rows), step)
        received = self._peers(len(into), -step)
        work: Any = dist.all_to_all_single(into, rows, received, sent, group=self.group, async_op=True)
        return work

    def _peers(self, count: int, step: int) -> list[int]:
        peers = [0] * len(self.rows)
        peers[(self.rank + step) % len(self.rows)] = count
        return peers


def _added(rows_ND: Tensor, more_ND: Tensor) -> Tensor:
    """``rows_ND`` with ``more_ND`` added to its first rows."""
    total_ND = rows_ND.clone()
    total_ND[: len(more_ND)] += more_ND
    return total_ND


@final
class _Rounds:
    """Consecutive rounds: the first starts at once, the rest in ``wait``."""

    def __init__(self, rounds: Iterator[Round]) -> None:
        self._rounds = rounds
        self._under_way = next(rounds, None)

    def wait(self) -> None:
        """Run the remaining rounds."""
        while self._under_way is not None:
            for work in self._under_way:
                work.wait()
            self._under_way = next(self._rounds, None)


@final
class Onward:
    """Starts rows on their way out. Tensors are in order of lanes, the same number for each."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        """Buffers of the arriving rows, in order of hops, and the works to wait for."""
        return _launch([(sum(lane.arriving), lane.out) for lane in self.lanes], tensors)


@final
class Return:
    """Starts sums on their way back: the dual of :class:`Onward`."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Work]]:
        """Buffers of the returning sums, in the order in which rows left, and the works to wait for."""
        return _launch([(lane.leaving[0], lane.back) for lane in self.lanes], tensors)


def _launch(
    moves: Sequence[tuple[int, Callable[[Sequence[Tensor], Sequence[Tensor]], Iterator[Round]]]],
    tensors: Sequence[Tensor],
) -> tuple[list[Tensor], list[Work]]:
    """Start a movement on every lane, given the number of rows that arrive. Hops of the lanes run concurrently."""
    each = len(tensors) // len(moves)
    buffers: list[Tensor] = []
    rounds = []
    for index, (size, move) in enumerate(moves):
        sent = tensors[index * each : (index + 1) * each]
        into = [tensor.new_empty(size, *tensor.shape[1:]) for tensor in sent]
        rounds.append(move(sent, into))
        buffers += into
    together = ([work for hop in hops for work in hop] for hops in zip_longest(*rounds, fillvalue=[]))
    return buffers, [_Rounds(together)]
