"""Weight gradients that a scheduler computes later than the gradients of inputs.

PyTorch cannot split the backward of a custom Function: asked for the gradients of inputs alone, the Function still sees
all of its inputs as needed. So GEMMs leave their weight gradients here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Wgrads:
    """Weight gradients that backward leaves to :meth:`run`: those of the GEMMs that run forward in a context with it.

    ``with forward_with(wgrads=...)`` of :mod:`moefw.runtime.forward_context` is such a context.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Number of weight gradients that are left."""
        return len(self._waiting)

    def leave(self, accumulate: Callable[[], None]) -> None:
        """Leave to :meth:`run` what computes the gradient of one weight and accumulates it."""
        self._waiting.append(accumulate)

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients in the order of backward, and accumulate them in the parameters.

        With parameters that FSDP shards, call :func:`moefw.runtime.parallel.sharding.reduce_pass` afterwards.
        """
        waiting = self._waiting
        self._waiting = []
        for accumulate in waiting:
            accumulate()
