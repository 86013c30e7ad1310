"""Segments of tokens, and the sums over them of which balance losses are made. G segments of tokens, X = E + 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """``count`` segments of tokens, one after another.

    ``segment_T`` int64: the segment of each token, 0 to ``count`` - 1, ascending, which kernels do not check. A segment
    may have none. None: each segment has equally many.
    """

    count: int
    segment_T: Tensor | None = None


class Sums(NamedTuple):
    """``mass_GE``, the shares of a segment's valid tokens, added up: in the dtype of the logits, with a graph.

    ``seen_GX`` fp32: how many of these tokens choose each expert, and how many there are.
    """

    mass_GE: Tensor
    seen_GX: Tensor
