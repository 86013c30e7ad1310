"""Token permutation: tokens to rows and rows back to tokens, each the backward of the other."""

from moefw_kernels.permute.arrival import Arrival, arrange, in_blocks, weights_of
from moefw_kernels.permute.groups import (
    Groups,
    Slots,
    Sorted,
    count_ids,
    distinct,
    group_chunks,
    sort_choices,
    sort_slots,
)
from moefw_kernels.permute.rows import RowMap, gather, gather_sum

__all__ = [
    "Arrival",
    "Groups",
    "RowMap",
    "Slots",
    "Sorted",
    "arrange",
    "count_ids",
    "distinct",
    "gather",
    "gather_sum",
    "group_chunks",
    "in_blocks",
    "sort_choices",
    "sort_slots",
    "weights_of",
]
