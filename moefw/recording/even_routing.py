"""Even routing, independent of the scores, so that a measurement is the same on every rank and in every run.

Or routing that is as uneven as :class:`moefw.recording.skew.Skew` says.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from moefw.recording.patches import Mode, holds_dtensor
from moefw.recording.skew import Skew

_TOPK: Final = torch.ops.aten.topk.default
CHOOSING: Final = (_TOPK, torch.ops.aten.sort.default, torch.ops.aten.sort.stable)
"""Operators that choose."""


@final
class EvenChoice(Mode):
    """Dispatch mode in which ``topk`` and ``sort`` choose evenly, or as ``skew`` says (:func:`chosen_evenly`)."""

    def __init__(self, skew: Skew | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.skew = skew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; replace the indices."""
        if holds_dtensor(types):
            return NotImplemented  # its local tensors come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        return chosen_evenly(func, args, kwargs, result, self.skew) if func in CHOOSING else result


def chosen_evenly(func: Any, args: Any, kwargs: Any, result: Any, skew: Skew | None = None) -> Any:
    """Result of an operator that chooses among floating-point values, with other indices. The values stay.

    Row t of a ``topk`` of k among n chooses ``(t + i n / k) mod n`` for i below k. So the choices of a row are as far
    apart as possible, and every index is chosen equally often if n / k divides the number of rows. ``sort`` keeps the
    order. Experts of tokens are chosen as ``skew`` says, if there is one.
    """
    if not args[0].is_floating_point():
        return result
    values, indices = result
    dim = args[2] if func is _TOPK and len(args) > 2 else kwargs.get("dim", -1)
    with unset_fake_temporarily():
        if skew is not None and skew.chooses(func, args[0], dim, indices.shape[dim]):
            chosen = skew.chosen(indices.shape)
        else:
            chosen = _spread(indices.shape, dim, args[0].shape[dim])
    return values, chosen if isinstance(indices, FakeTensor) else indices.copy_(chosen)


def _spread(shape: torch.Size, dim: int, count: int) -> Tensor:
    """Indices below ``count``, int64, of shape ``shape``, that differ along ``dim``."""
    num_chosen = shape[dim]
    num_rows = shape.numel() // max(1, num_chosen)
    rows = torch.arange(num_rows)
    # Where all are chosen, as by a sort, the order stays: every row begins with index 0.
    first = torch.zeros_like(rows) if num_chosen == count else rows
    steps = torch.arange(num_chosen) * count // max(1, num_chosen)
    indices = (first.unsqueeze(1) + steps) % count  # (rows, chosen)
    sizes_of_rows = [*shape[:dim], *shape[dim:][1:]]
    return indices.view(*sizes_of_rows, num_chosen).movedim(-1, dim).contiguous()
