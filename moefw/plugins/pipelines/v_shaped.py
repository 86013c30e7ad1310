"""``zbv`` and ``dualpipe-v``: two stages a rank, so that rank 0 holds the first stage and the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from attrs import field, frozen

import moefw
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Order


@frozen
class ZBV(PipelinePlugin):
    """ZB-V (arXiv 2401.10241): weight gradients fill idle time. Every rank holds as much as rank 0 does in ``1f1b``.

    Its idle time assumes that a forward, gradients of inputs and gradients of weights take equally long.
    """

    name: ClassVar[str] = "zbv"
    left_out: ClassVar[Mapping[str, str]] = {
        "merged": "zbv has weight gradients between a backward and the next forward. Use dualpipe-v, of the same shape."
    }

    @property
    def chunks(self) -> int:
        """Two: on the way to the last rank, and on the way back."""
        return 2

    def rank_of(self, stage: int, ranks: int) -> int:
        """Rank of a stage: up, then down again."""
        return _in_a_v(stage, ranks)

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Order of torch's ``ScheduleZBVZeroBubble``."""
        from moefw.plugins.pipelines.torch_orders import order_of

        return order_of("ScheduleZBVZeroBubble", 2, ranks, micro_batches)


@frozen
class DualPipeV(PipelinePlugin):
    """DualPipe (arXiv 2412.19437) with each stage on one rank: forwards stand next to backwards of others."""

    name: ClassVar[str] = "dualpipe-v"

    merged: bool = field(default=False, kw_only=True)
    """Whether these run phase by phase: one computes while rows of the other travel."""

    @property
    def merges(self) -> bool:
        """Whether passes are merged."""
        return self.merged

    @property
    def chunks(self) -> int:
        """Two: on the way to the last rank, and on the way back."""
        return 2

    def rank_of(self, stage: int, ranks: int) -> int:
        """Rank of a stage: up, then down again."""
        return _in_a_v(stage, ranks)

    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        """Yield a problem of fewer micro-batches than stages."""
        if micro_batches < 2 * ranks:
            yield moefw.Problem(
                f"dualpipe-v runs at least as many micro-batches as stages, {2 * ranks}, and not {micro_batches}.",
                f"Use {2 * ranks} micro-batches a step, or use: zbv.",
            )

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Order of torch's ``ScheduleDualPipeV``."""
        from moefw.plugins.pipelines.torch_orders import order_of

        return order_of("ScheduleDualPipeV", 2, ranks, micro_batches, merged=self.merged)


def _in_a_v(stage: int, ranks: int) -> int:
    """Rank of a stage: 0, 1, ..., ranks - 1, ranks - 1, ..., 1, 0."""
    return stage if stage < ranks else 2 * ranks - 1 - stage


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedules."""
    return [ZBV, DualPipeV]
