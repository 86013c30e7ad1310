"""The tensors among an operator's arguments or results, which PyTorch's own walk finds ten times as slowly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Sequence[Tensor]:
    """Tensors in tuples, lists and values of dicts, in order."""
    found: list[Tensor] = []
    _find((tree,), found)
    return found


def _find(items: Iterable[Any], found: list[Tensor]) -> None:
    """Add the tensors among the items and in them. A call a collection: most items are tensors and numbers."""
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            _find(item, found)
        elif isinstance(item, dict):
            _find(item.values(), found)
