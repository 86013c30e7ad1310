"""Recompute by PyTorch's non-reentrant checkpoint.

It stops as soon as the last saved tensor is back: a region that ends in a GEMM drops the GEMM's input without
running the GEMM again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch.utils.checkpoint import checkpoint

from moefw.core.contracts import MemoryPolicy


@final
class RecomputePolicy(MemoryPolicy):
    """Keeps a region's inputs only."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` under a checkpoint. Nothing in a region draws random numbers by call order."""
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
