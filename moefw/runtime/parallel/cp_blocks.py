"""Blocks of neighbours on cp that share sequences of their own (dynamic context parallelism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.records import Side, Zero

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PIECES_OF_A_RANK: Final = 2
"""Number of equal pieces that each rank has of a sequence that several share."""


def pieces_of(cp: int) -> int:
    """Number of equal pieces of a sequence that ranks share: two for each, or one for a rank alone."""
    return PIECES_OF_A_RANK * cp if cp > 1 else 1


def block_sizes(cp: int) -> tuple[int, ...]:
    """Sizes of blocks: 1, doubled while it divides ``cp``, and ``cp``. Each one is whole smaller ones."""
    sizes = [1]
    while cp % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return tuple(dict.fromkeys((*sizes, cp)))


@final
class BlockPlan(LayoutPlan):
    """A plan whose cp is a block of ``block`` neighbours on the cp of ``whole``. Its dp counts the blocks."""

    def __init__(self, whole: LayoutPlan, block: int) -> None:
        self.whole = whole
        self.block = block
        self.world = whole.world
        self.blocks = whole.sizes["cp"] // block

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis."""
        return {**self.whole.sizes, "cp": self.block, "dp": self.whole.sizes["dp"] * self.blocks}

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's position on every axis."""
        of_whole = self.whole.coordinates(rank)
        number, index = divmod(of_whole["cp"], self.block)
        return {**of_whole, "cp": index, "dp": of_whole["dp"] * self.blocks + number}

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, in ascending order."""
        changed = {"dp", "cp"}  # the axes on which positions differ from those of the whole plan
        if not changed & {*axes}:
            return self.whole.group(rank, axes)
        # A block is a part of cp, and so is what this plan adds to dp: the group is a part of one over all of cp.
        candidates = self.whole.group(rank, tuple(dict.fromkeys((*axes, "cp"))))
        own = self.coordinates(rank)
        fixed = changed - {*axes}
        return tuple(
            candidate
            for candidate in candidates
            if all(self.coordinates(candidate)[axis] == own[axis] for axis in fixed)
        )

    def copies(self, rank: int, side: Side) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same parameters as ``rank``, a row for each set that shards them."""
        return self.whole.copies(rank, side)

    def zero(self, side: Side) -> Zero:
        """Stage of ZeRO of the parameters of a mesh."""
        return self.whole.zero(side)


@final
class BlockLayout(Layout):
    """A layout opened as another one, with the plan of its blocks."""

    def __init__(self, whole: Layout, size: int) -> None:
        self.whole = whole
        self.plan = BlockPlan(whole.plan, size)
        self.rank = whole.rank
        self.device = whole.device
        self.ranks_per_node = whole.ranks_per_node

    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Process group of ``ranks``, or None if it is this rank alone. Collective over ``ranks``."""
        return self.whole.open(ranks)

    def host_group(self) -> ProcessGroup | None:
        """Group of all ranks for host tensors."""
        return self.whole.host_group()


def layouts_by_cp(layout: Layout, *, dynamic: bool) -> Mapping[int | None, Layout]:
    """Layout for each number of ranks of cp that may share a batch, ``Batch.cp``; None: all of them."""
    cp = layout.size("cp")
    smaller = block_sizes(cp)[:-1] if dynamic else ()
    return {None: layout, cp: layout, **{size: BlockLayout(layout, size) for size in smaller}}
