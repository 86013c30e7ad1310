"""Weight gradients that a scheduler computes later than the gradients of inputs.

PyTorch cannot split the backward of a custom Function: asked for the gradients of inputs alone, the Function still sees
all of its inputs as needed. So GEMMs ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch


@final
class Wgrads:
    """Weight gradients of the GEMMs that run forward in :meth:`collected`. Backward leaves them to :meth:`run`."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Leave the weight gradients of GEMMs in this block to :meth:`run`."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    def leave(self, accumulate: Callable[[], None]) -> None:
        """Leave to :meth:`run` what computes the gradient of one weight and accumulates it."""
        self._waiting.append(accumulate)

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients in the order of backward, and accumulate them in the parameters.

        With parameters that FSDP shards, call :func:`moefw.runtime.parallel.sharding.reduce_late` afterwards.
        """
        waiting = self._waiting
        self._waiting = []
        for accumulate in waiting:
            accumulate()


_current: ContextVar[Wgrads | None] = ContextVar("wgrads", default=None)


def current() -> Wgrads | None:
    """Collection to which a GEMM that runs forward now leaves its weight gradient; None: it leaves none."""
    return _current.get()
