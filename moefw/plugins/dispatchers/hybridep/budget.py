"""How many rows a rank has room for, where that is a static number."""

from __future__ import annotations

import math
from typing import Literal

from attrs import frozen


@frozen
class Budget:
    """``rank_capacity`` times the rows that a rank gets if all are balanced.

    Rows beyond it are left out: ``on_overflow`` rerun reports that some were, drop how many.
    """

    rank_capacity: float
    on_overflow: Literal["rerun", "drop"]

    @property
    def stat(self) -> str:
        """The statistic that reports rows that were left out."""
        return "dropped_rows" if self.on_overflow == "drop" else "overflow"

    def rows(self, choices: int, alignment: int) -> int:
        """Return the room, given the choices of the rank that has most tokens; rounded up to the alignment."""
        return -(-math.ceil(self.rank_capacity * choices) // alignment) * alignment
