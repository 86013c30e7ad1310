"""Number of pages that rows take."""

from __future__ import annotations

import math
from typing import Final

ROUNDING: Final = 1e-6
"""Fraction of a page that does not require another page."""


def num_pages(rows: float, page_rows: int) -> int:
    """Return the number of pages of ``page_rows`` for ``rows``, which may be fractional."""
    return math.ceil(rows / page_rows - ROUNDING)
