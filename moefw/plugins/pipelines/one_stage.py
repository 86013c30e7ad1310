"""``gpipe`` and ``1f1b``: one stage a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PipelinePlugin


@frozen
class GPipe(PipelinePlugin):
    """All forwards of a step, then all backwards (arXiv 1811.06965). Holds every micro-batch of a step."""

    name: ClassVar[str] = "gpipe"

    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        """Return the order of torch's ``ScheduleGPipe``."""
        from moefw.plugins.pipelines.torch_orders import order_of

        return order_of("ScheduleGPipe", 1, ranks, micro_batches)


@frozen
class OneForwardOneBackward(PipelinePlugin):
    """Forwards and backwards alternate (arXiv 2006.09503). Holds at most as many micro-batches as there are stages."""

    name: ClassVar[str] = "1f1b"

    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        """Return the order of torch's ``Schedule1F1B``."""
        from moefw.plugins.pipelines.torch_orders import order_of

        return order_of("Schedule1F1B", 1, ranks, micro_batches)


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedules."""
    return [GPipe, OneForwardOneBackward]
