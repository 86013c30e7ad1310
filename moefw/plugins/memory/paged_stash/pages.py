"""How many pages rows take."""

from __future__ import annotations

import math
from typing import Final

ROUNDING: Final = 1e-6
"""So much of a page is no reason for a further one."""


def num_pages(rows: float, page_rows: int) -> int:
    """Return the pages of ``page_rows`` for so many rows, which may be a share of a number."""
    return math.ceil(rows / page_rows - ROUNDING)
