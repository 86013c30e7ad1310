"""Forward and backward of the micro-batches of one step, as the engine calls them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from moefw.core.stages import Batch
from moefw.training.attempt import Tally


class Clock(Protocol):
    """Measures the time of named sections."""

    def __call__(self, section: str) -> AbstractContextManager[None]:
        """Measure the section that follows."""


class Run(Protocol):
    """Accumulates the gradients of micro-batches."""

    def __call__(self, batches: Sequence[Batch], clock: Clock) -> Tally:
        """Run forward and backward of all batches. Return the sums of this rank, added in the order of the batches."""


def in_order(model: nn.Module, *, keep_routes: bool = False) -> Run:
    """Return the run of each micro-batch forward and backward before the next. ``keep_routes``: see :class:`Tally`."""

    def run(batches: Sequence[Batch], clock: Clock) -> Tally:
        tally = Tally(batches[0].ids_BS.device, keep_routes=keep_routes)
        for batch in batches:
            with clock("forward"):
                output = model(batch)
            with clock("backward"):
                (output.objective * batch.loss_scale).backward()
            tally.add(output)
            del output
        return tally

    return run
