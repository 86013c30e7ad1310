"""Who says what of memory: a part has the method, or the plan names it among those that do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from moefw.ledger.parts import Formats, ModelMemory, PartMemory, Placement, RankShape, StateRest, Tensor


@runtime_checkable
class SaysMemory(Protocol):
    """A router, a dispatcher or a GEMM that says what it takes."""

    def memory(self, shape: RankShape) -> PartMemory | None:
        """Return what the part takes in one layer; None: it does not say."""


@runtime_checkable
class SaysModelMemory(Protocol):
    """A model that says what it takes."""

    def memory(self, shape: RankShape, moe: Mapping[int, Sequence[PartMemory]]) -> ModelMemory | None:
        """Return what the model takes; None: it does not say.

        ``moe`` holds router, dispatcher and GEMM of each MoE layer. Their regions go by these names: the model gives
        them ``x`` (:meth:`RankShape.tokens_given`) and puts the experts' into a region ``experts``.
        """


@runtime_checkable
class SaysFormats(Protocol):
    """A precision that says what GEMMs keep of their operands."""

    def formats(self) -> Formats | None:
        """Return what is kept under the recipe; None: it does not say."""

    def fallback_formats(self) -> Formats | None:
        """Return the same of what modules compute in that are kept in high precision."""


@runtime_checkable
class SaysPlacements(Protocol):
    """A memory policy that says where what it treats waits. Not asked where it ``runs_again``."""

    def placements(self, saved: Sequence[Tensor], shape: RankShape) -> Sequence[Placement] | None:
        """Return where each tensor waits that one call of a region saves, in their order; None: it does not say.

        A placement need not add up to the tensor's bytes: of ``shape.rows`` rows, ``shape.valid_rows`` are of tokens.
        """


@runtime_checkable
class SaysRest(Protocol):
    """A policy for the optimizer's states that says how they rest."""

    def rests(self, state: StateRest) -> StateRest | None:
        """Return how a state rests that would rest as ``state`` without this policy; None: it does not say."""
