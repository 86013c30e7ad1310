"""The memory of a step, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import frozen

from moefw.planner.report import Work
from moefw.recording.places import Place


@frozen(kw_only=True)
class Saved:
    """A storage that forward left for backward."""

    nbytes: int
    place: Place
    """The place where it was first saved; if autograd did not save it, the first region with a memory policy that
    received it, or else the place where it was allocated."""
    made_in: Place
    weights: bool
    """Whether it is a copy of parameters: computed from parameters alone, or gathered from other ranks."""
    tensor: str
    """The operator that made it, and the dtype and shape of its result."""


@frozen(kw_only=True)
class Measured:
    """The memory of one rank in a step: whole storages, without an allocator's rounding and without memory inside of
    operators.

    All in bytes. ``held``: there before and after the step, by kind: parameters, gradients, optimizer, buffers, other.
    ``saved``: between the forward and the backward of the first micro-batch. ``peak_held`` adds up to ``peak``.
    """

    rank: int
    world: int
    micro_batches: int
    tokens: int
    """Tokens of a micro-batch of this rank."""
    attention: str
    """The operator that computed attention."""
    held: Mapping[str, int]
    saved: tuple[Saved, ...]
    off_device: int
    """Bytes of the buffers to which policies moved tensors."""
    peak: int
    peak_place: Place
    peak_held: Mapping[str, int]
    """Bytes by the kinds of ``held``; ``saved``: from a forward until its backward; ``gathered``: parameters from other
    ranks; ``operands``: operands of weights that micro-batches share; ``passing``: the rest."""
    work: tuple[Work, ...]
    """Operators of forward and backward, of all micro-batches together, and what is made of weights for all of them."""

    @property
    def saved_bytes(self) -> int:
        """All that is saved, copies of weights included."""
        return sum(storage.nbytes for storage in self.saved)

    def by_region(self, layer: int | None = None) -> dict[str, int]:
        """Bytes saved by region, weights apart; of one layer, or of the whole model."""
        regions: Counter[str] = Counter()
        for storage in self.saved:
            if layer is None or storage.place.layer == layer:
                regions["weights" if storage.weights else storage.place.region] += storage.nbytes
        return dict(regions)
