"""Recompute: keeps the inputs of a region. Its saved tensors and outputs are computed again when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch

from moefw.core.contracts import MemoryPolicy
from moefw.plugins.memory.recompute.call import Movement, Run


@final
class RecomputePolicy(MemoryPolicy):
    """Keeps a region's inputs only."""

    drops_outputs: ClassVar[bool] = True

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which backward runs again. Nothing in a region draws random numbers by call order."""

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            return Run(region, function, args, kwargs).result(*args, **kwargs)

        return recomputed

    def wrap_movement(self, region: str, finish: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish``. Its saved tensors are kept, and ``again`` recomputes its outputs."""

        def repeated(pending: Any, *args: Any) -> Any:
            brought, handle = finish(pending, *args)
            if torch.is_grad_enabled():
                brought = Movement(again, handle, args).returned(brought)
            return brought, handle

        return repeated
