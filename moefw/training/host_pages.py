"""What the C library does with memory that a rank on a CPU has freed."""

from __future__ import annotations

import ctypes
from typing import Final

KEEP_PAGES: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""glibc settings for ranks on a CPU: freed activations are used again instead of returned and faulted in anew
(a step of the quickstart is 13 to 20 % shorter). Small pieces that threads would keep to themselves are joined with
their neighbours: they would cut the gaps that activations need."""


def return_free_pages() -> None:
    """Return the pages that hold nothing now to the system, where the C library is glibc.

    Kept pages only ever become more: an allocation that finds no gap large enough takes new ones. Called now and then,
    this bounds what a long run holds by what it needs between two calls.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
