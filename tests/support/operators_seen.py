"""The operators that run, one by one."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class Operators(TorchDispatchMode):
    """Notes the names of all operators that run while it is active, and with them the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.names.append(func.name())
        self.seen.append(f"{func.name()} {shapes}")
        return result
