"""What a sort of ids of experts finds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SortedIds(NamedTuple):
    """Ids in ascending order, equal ones in the order in which they were given; those outside the range come last."""

    order_N: Tensor
    """Index of the id at each place, int64, or int32 from the kernel."""
    counts: Tensor
    """How often each id in the range occurs, ``(num_experts)`` int64, as collectives send it."""
    counts_e: Tensor
    """The same in int32, as experts take it."""
    ends_e: Tensor
    """Place behind the last of each id in the range, ``(num_experts)`` int32: the running sum of ``counts_e``."""
