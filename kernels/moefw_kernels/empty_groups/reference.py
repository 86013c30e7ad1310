"""Reference: one pass over all groups."""

from __future__ import annotations

from torch import Tensor


def clear_empty_groups(product_eNI: Tensor, ends_e: Tensor) -> None:
    """Fill the matrices of groups without rows with zeros."""
    sizes_e = ends_e.diff(prepend=ends_e.new_zeros(1))
    product_eNI.masked_fill_((sizes_e == 0).view(-1, 1, 1), 0.0)
