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
copy over some of them (``LayoutPlan.copies``). An embedding may also lie in several stages of a pipeline. Of all ranks
that hold a tensor, one writes it to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen
from torch import Tensor, nn

from moefw.core.contracts import Layout
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

    def written(self, value: Tensor, layout: Layout, turn: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each piece of ``value`` that this rank writes, whole. Collective.

        ``value``: the parameter, a tensor of its shape, or a scalar that belongs to it. The ranks that hold copies take
        turns: rank ``turn`` of them writes, counted around.
        """
        if not self.in_stage(layout):
            return
        gathered = values_of(whole(value))
        if not self.has_turn(layout, turn):
            return
        for piece in self.pieces:
            tensor = self.joined(piece, gathered, layout)
            if is_first_part(piece):
                yield piece.name, tensor

    def in_stage(self, layout: Layout) -> bool:
        """Whether this rank is in the one stage that writes the parameter, of those that hold copies."""
        return not self.stages or layout.index("pp") == self.stages[0]

    def has_turn(self, layout: Layout, turn: int = 0) -> bool:
        """Whether it is this rank's turn among those that hold copies: see :meth:`written`."""
        return layout.index(*self.copied_over) == turn % layout.size(*self.copied_over)

    def joined(self, piece: Canonical, gathered: Tensor, layout: Layout) -> Tensor:
        """Whole tensor of a piece, from a value of :meth:`written` that no rank shards.

        Collective over the ranks that hold its parts.
        """
        tensor = piece.of(gathered) if gathered.shape == self.parameter.shape else gathered
        return tensor if piece.shard is None else joined(tensor, piece.shard, layout.group(piece.shard.axis))

    def _num_shards(self, layout: Layout) -> int:
        """Number of ranks over which FSDP shards each copy."""
        return len(layout.plan.copies(layout.rank, self.side)[0])


def holdings(model: nn.Module) -> Iterator[Holding]:
    """Yield how ranks hold each parameter of a model on this rank."""
    experts = expert_parameters(model)
    for parameter, pieces in by_parameter(model):
        yield Holding(parameter=parameter, pieces=pieces, side="experts" if parameter in experts else "dense")


def is_first_part(piece: Canonical) -> bool:
    """Whether this rank holds the first part of a tensor that ranks split, or all of one that they do not."""
    return piece.shard is None or piece.shard.index == 0


def writes_state(side: Side, layout: Layout) -> bool:
    """Whether this rank writes the states of the modules of a mesh."""
    return layout.index(*STATE_HOLDERS[side]) == 0
