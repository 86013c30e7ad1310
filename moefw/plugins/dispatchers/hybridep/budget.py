"""Static number of rows that a rank has room for."""

from __future__ import annotations

import math
from typing import Literal

from attrs import frozen


@frozen
class Budget:
    """``rank_capacity`` times the rows of a rank under balanced load.

    Rows beyond it are dropped. ``on_overflow`` rerun reports that some were dropped, drop reports how many.
    """

    rank_capacity: float
    on_overflow: Literal["rerun", "drop"]

    @property
    def stat(self) -> str:
        """The statistic that reports dropped rows."""
        return "dropped_rows" if self.on_overflow == "drop" else "overflow"

    def rows(self, choices: int, alignment: int) -> int:
        """Return the number of rows, given the choices of the rank with the most tokens, rounded up to alignment."""
        return -(-math.ceil(self.rank_capacity * choices) // alignment) * alignment
