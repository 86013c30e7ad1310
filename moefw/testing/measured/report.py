"""What a step held, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import frozen

from moefw.recording.places import Place


@frozen(kw_only=True)
class Saved:
    """A storage that forward left for backward."""

    nbytes: int
    place: Place
    """Where it was saved first; if autograd saved it nowhere, the region with a memory policy that was given it first,
    or else where it was made."""
    made_in: Place
    weights: bool
    """Whether it was computed from parameters alone, or gathered from other ranks: a copy of parameters."""
    tensor: str
    """The operator that made it, and the dtype and shape of its result."""


@frozen(kw_only=True)
class Measured:
    """What one rank held in a step, as PyTorch's memory tracker counts it: whole storages, without an allocator's
    rounding, and without what an operator uses inside.

    Bytes throughout. ``held`` lies there before and after: parameters, gradients, optimizer, buffers, other.
    ``saved`` lies between the forward and the backward of the first micro-batch. ``peak_held`` adds up to ``peak``.
    """

    rank: int
    world: int
    micro_batches: int
    tokens: int
    """In a micro-batch of this rank."""
    attention: str
    """The operator that computed attention."""
    held: Mapping[str, int]
    saved: tuple[Saved, ...]
    off_device: int
    """The buffers that a policy moved tensors to."""
    peak: int
    peak_place: Place
    peak_held: Mapping[str, int]
    """The kinds of ``held``; ``saved``: from a forward until its backward; ``gathered``: parameters from other ranks;
    ``passing``: all else."""

    @property
    def saved_bytes(self) -> int:
        """All that is saved, copies of weights included."""
        return sum(one.nbytes for one in self.saved)

    def by_region(self, layer: int | None = None) -> dict[str, int]:
        """Return the bytes saved by region, weights apart; of one layer, or of the whole model."""
        found: Counter[str] = Counter()
        for one in self.saved:
            if layer is None or one.place.layer == layer:
                found["weights" if one.weights else one.place.region] += one.nbytes
        return dict(found)

    def made_by_region(self, layer: int | None = None) -> dict[str, int]:
        """Return the same bytes by the region that made them."""
        found: Counter[str] = Counter()
        for one in self.saved:
            if layer is None or one.made_in.layer == layer:
                found["weights" if one.weights else one.made_in.region] += one.nbytes
        return dict(found)
