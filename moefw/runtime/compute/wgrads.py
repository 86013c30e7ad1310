"""Weight gradients that a scheduler computes later than the gradients of inputs.

PyTorch cannot split the backward of a custom Function: asked for the gradients of inputs alone, the Function still sees
all of its inputs as needed. So GEMMs ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Compute = Callable[[], Tensor]


@final
class Wgrads:
    """Weight gradients of the GEMMs that run forward in :meth:`collected`. Backward leaves them to :meth:`run`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[GradientEdge, Compute]] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Leave the weight gradients of GEMMs in this block to :meth:`run`."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    def leave(self, weight: GradientEdge, compute: Compute) -> None:
        """Leave the gradient of one weight to :meth:`run`."""
        self._waiting.append((weight, compute))

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients in the order of backward, and accumulate them in the parameters.

        With parameters that FSDP shards, call :func:`moefw.runtime.parallel.sharding.reduce_late` afterwards.
        """
        waiting, self._waiting = self._waiting, []
        for weight, compute in waiting:
            torch.autograd.backward([weight], [compute()])


_current: ContextVar[Wgrads | None] = ContextVar("wgrads", default=None)


def current() -> Wgrads | None:
    """Return the collection to which a GEMM that runs forward now leaves its weight gradient; None: it leaves none."""
    return _current.get()


def now_or_later(ctx: Any, later: Wgrads | None, index: int, compute: Compute) -> Tensor | None:
    """Return the gradient of a Function's weight, or leave it to ``later`` and return None.

    ``index``: the position of the weight among the Function's tensor inputs.
    """
    if later is None:
        return compute()
    later.leave(GradientEdge(*ctx.next_functions[index]), compute)
    return None
