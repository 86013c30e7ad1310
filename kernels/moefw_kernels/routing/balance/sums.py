"""Rows of tokens, and the sums over them of which balance losses are made. R rows of tokens, X = E + 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``count`` rows of tokens, one after another.

    ``row_T`` int64: the row of each token, 0 to ``count`` - 1, ascending, which kernels do not check. A row may have
    none. None: each row has equally many.
    """

    count: int
    row_T: Tensor | None = None


class Sums(NamedTuple):
    """``mass_RE``, the shares of a row's valid tokens, added up: in the dtype of the logits, with a graph.

    ``seen_RX`` fp32: how many of these tokens choose each expert, and how many there are.
    """

    mass_RE: Tensor
    seen_RX: Tensor
