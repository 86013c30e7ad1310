"""Context parallelism: the positions of each sequence that a rank of cp holds.

Under a causal mask, later queries have more keys. So a sequence is cut into twice as many equal pieces as ranks, and
each rank has one from the front and the one as far from the back: all ranks have equally many scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.stages import Batch
from moefw.runtime.communication.gather import gather
from moefw.runtime.communication.movement import finish
from moefw.runtime.parallel.cp_blocks import pieces_of


@final
class SequenceCut:
    """The cut of sequences among the ranks of cp. With one rank, nothing is cut.

    The length of a sequence is a multiple of ``unit``. Of a pack, each sequence is cut: ``lengths`` are theirs.
    """

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size("cp")
        self.index = layout.index("cp")
        self.group = layout.group("cp")
        self.unit = pieces_of(self.size)

    def pieces(self, rank: int) -> tuple[int, int]:
        """Numbers of the pieces that a rank of cp holds, of ``unit`` pieces."""
        return rank, self.unit - 1 - rank

    def own(self, whole: Tensor, dim: int = 1, lengths: Sequence[int] | None = None) -> Tensor:
        """This rank's positions of whole sequences, which lie along ``dim``: one, or those of a pack."""
        if self.size == 1:
            return whole
        return torch.cat(self._pieces(whole, dim, self.index, lengths), dim)

    def by_rank(self, whole: Tensor, dim: int, lengths: Sequence[int] | None = None) -> Tensor:
        """Positions of whole sequences along ``dim`` rank by rank."""
        ranks = range(self.size)
        return torch.cat([piece for rank in ranks for piece in self._pieces(whole, dim, rank, lengths)], dim)

    def _pieces(self, whole: Tensor, dim: int, rank: int, lengths: Sequence[int] | None) -> list[Tensor]:
        """Pieces of a rank, sequence by sequence."""
        sequences = whole.split(lengths, dim) if lengths else (whole,)
        return [sequence.chunk(self.unit, dim)[number] for sequence in sequences for number in self.pieces(rank)]

    def places(self, length: int, device: torch.device, lengths: Sequence[int] | None = None) -> Tensor:
        """Where this rank's positions are in a row of ``length``: int64."""
        return self.own(torch.arange(length, device=device), 0, lengths)

    def whole(self, by_rank: Tensor, dim: int, lengths: Sequence[int] | None = None) -> Tensor:
        """Positions of all ranks along ``dim``, given rank by rank, in the order of the sequences."""
        lengths = lengths or (by_rank.shape[dim],)
        sizes: list[int] = []
        keys: list[tuple[int, int]] = []
        """The sequence and the number of each piece, in the order in which ranks hold them."""
        for rank in range(self.size):
            for sequence, length in enumerate(lengths):
                for number in self.pieces(rank):
                    sizes.append(length // self.unit)
                    keys.append((sequence, number))
        pieces = dict(zip(keys, by_rank.split(sizes, dim), strict=True))
        return torch.cat([pieces[key] for key in sorted(pieces)], dim)

    def gather(self, own_BSD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Positions of whole sequences, ``(B, S, D)``, from each rank's part. Collective over cp."""
        if self.size == 1:
            return own_BSD
        (by_rank,) = finish(gather([own_BSD.transpose(0, 1)], self.group))
        return self.whole(by_rank, 0, lengths).transpose(0, 1)

    def part(self, batch: Batch) -> Batch:
        """Batch of this rank's positions, from one of whole sequences. Documents stay whole."""
        if self.size == 1:
            return batch
        lengths = batch.lengths

        def own_or_none(values_BS: Tensor | None) -> Tensor | None:
            return None if values_BS is None else self.own(values_BS, 1, lengths)

        return replace(
            batch,
            ids_BS=self.own(batch.ids_BS, 1, lengths),
            labels_BS=self.own(batch.labels_BS, 1, lengths),
            mask_BS=own_or_none(batch.mask_BS),
            loss_mask_BS=own_or_none(batch.loss_mask_BS),
            positions_BS=own_or_none(batch.positions_BS),
            places_S=self.places(batch.ids_BS.shape[1], batch.ids_BS.device, lengths),
        )
