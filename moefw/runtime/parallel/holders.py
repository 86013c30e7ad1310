"""Which ranks hold, share and write each parameter and each state of a model.

=========================================  ==================  ===================================================
tensor                                     copies over         split over
=========================================  ==================  ===================================================
dense parameter                            dp, cp, tp          nothing
dense parameter that tp splits             dp, cp              tp
parameter of routed experts                edp                 ep (expert by expert), and etp where it splits them
factor of an adapter of them, not split    edp, etp            ep (expert by expert)
state of a dense module                    dp, cp, tp          nothing
state of routed experts                    edp, etp            ep
=========================================  ==================  ===================================================

The ranks that hold copies of a parameter have different tokens, so gradients are summed over them. FSDP may shard each
copy over some of them (``LayoutPlan.copies``). An embedding may also lie in several stages of a pipeline. Ranks that
store the same elements share the work of writing them to a checkpoint; one alone writes them to other folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen
from torch import Tensor, nn

from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.records import Canonical, Side
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.naming import by_parameter, expert_parameters, joined
from moefw.runtime.parallel.local_shards import whole
from moefw.runtime.parallel.meshes import COPIES

STAGE: Final = ("dp", "cp", "tp")
"""The axes of all ranks that have the same layers."""

STATE_HOLDERS: Final[Mapping[Side, tuple[str, ...]]] = {"dense": STAGE, "experts": ("edp", "etp")}
"""The axes of all ranks that hold a module's state: copies or parts of its weights, with different tokens."""


@frozen(eq=False)
class Holding:
    """How ranks hold a parameter. ``pieces``: its canonical tensors, which all lie on the same ranks."""

    parameter: nn.Parameter
    pieces: Sequence[Canonical]
    side: Side

    @property
    def split_axis(self) -> str | None:
        """Axis that the parameter is split over; None if it is not split."""
        return next((piece.shard.axis for piece in self.pieces if piece.shard is not None), None)

    @property
    def stages(self) -> tuple[int, ...]:
        """Positions on pp that hold copies, if several do; else empty."""
        return self.pieces[0].holders

    @property
    def copied_over(self) -> tuple[str, ...]:
        """Axes whose ranks hold copies, or shards of copies, with different tokens.

        tp holds copies of dense parameters that it does not split: each rank applies them to its part of the tokens, or
        to its part of the outputs. So does etp, where it splits experts, with the other factor of an adapter.
        """
        if self.side == "experts":
            return COPIES["experts"] if self.split_axis else STATE_HOLDERS["experts"]
        return COPIES["dense"] if self.split_axis else STAGE

    def summed_over(self, layout: Layout) -> tuple[str, ...]:
        """Axes over which gradients remain to be summed after FSDP, which sums over ``COPIES`` when it reduces."""
        done = COPIES[self.side] if self._num_shards(layout) > 1 else ()
        return tuple(axis for axis in self.copied_over if axis not in done)

    def num_copies(self, layout: Layout) -> int:
        """Number of ranks that hold each element."""
        return layout.size(*self.copied_over) // self._num_shards(layout) * max(1, len(self.stages))

    def written(self, value: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each piece of ``value`` that this rank writes whole, to a folder. Collective.

        ``value``: the parameter, or a tensor of its shape.
        """
        if not self.in_stage(layout):
            return
        gathered = values_of(whole(value))
        if not self.writes(layout):
            return
        for piece in self.pieces:
            tensor = self.joined(piece, gathered, layout)
            if is_first_part(piece):
                yield piece.name, tensor

    def in_stage(self, layout: Layout) -> bool:
        """Whether this rank is in the one stage that writes the parameter, of those that hold copies."""
        return not self.stages or layout.index("pp") == self.stages[0]

    def writes(self, layout: Layout) -> bool:
        """Whether this rank is the one that writes, of those that hold copies in a stage: see :meth:`written`."""
        return layout.index(*self.copied_over) == 0

    def joined(self, piece: Canonical, gathered: Tensor, layout: Layout) -> Tensor:
        """Whole tensor of a piece, from a value of :meth:`written` that no rank shards.

        Collective over the ranks that hold its parts.
        """
        tensor = piece.of(gathered)
        return tensor if piece.shard is None else joined(tensor, piece.shard, layout.group(piece.shard.axis))

    def _num_shards(self, layout: Layout) -> int:
        """Number of ranks over which FSDP shards each copy."""
        return layout.plan.num_shards(self.side)


def holdings(model: nn.Module) -> Iterator[Holding]:
    """Yield how ranks hold each parameter of a model on this rank."""
    experts = expert_parameters(model)
    for parameter, pieces in by_parameter(model):
        yield Holding(parameter=parameter, pieces=pieces, side="experts" if parameter in experts else "dense")


def storing_same(
    layout: Layout, side: Side, axes: Sequence[str], stages: Sequence[int] = (), *, sharded: bool
) -> tuple[int, ...]:
    """Ranks that store the same elements of a tensor as this one, in ascending order, by arithmetic alone.

    ``axes`` are those whose ranks hold copies of it, and ``stages`` the positions on pp that do, if several.
    ``sharded``: FSDP shards it with the parameters of its side, so that a copy is that of one shard.
    """
    plan = layout.plan
    ranks = plan.group(layout.rank, ("pp", *axes) if stages else axes)
    if stages:
        ranks = tuple(rank for rank in ranks if plan.coordinates(rank)["pp"] in stages)
    if not sharded:
        return ranks
    shard = _shard(plan, layout.rank, side)
    return tuple(rank for rank in ranks if _shard(plan, rank, side) == shard)


def _shard(plan: LayoutPlan, rank: int, side: Side) -> int:
    """Number of the shard that FSDP gives a rank."""
    return next(row.index(rank) for row in plan.copies(rank, side) if rank in row)


def is_first_part(piece: Canonical) -> bool:
    """Whether this rank holds the first part of a tensor that ranks split, or all of one that they do not."""
    return piece.shard is None or piece.shard.index == 0


def writes_state(side: Side, layout: Layout) -> bool:
    """Whether this rank writes the states of the modules of a mesh."""
    return layout.index(*STATE_HOLDERS[side]) == 0
