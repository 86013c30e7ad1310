"""``zero-bubble``: 1F1B whose ranks compute weight gradients where they would idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PipelinePlugin


@frozen
class ZeroBubble(PipelinePlugin):
    """ZB-H1 (arXiv 2401.10241): the idle time of ``1f1b`` without that of weight gradients.

    On every rank as many micro-batches as ranks wait for a part of their backward.
    """

    name: ClassVar[str] = "zero-bubble"

    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        """Return the order of ``1f1b``. Weight gradients of rank r wait for those of inputs of r more micro-batches."""
        return [_delayed(rank, min(ranks - 1 - rank, micro_batches), micro_batches) for rank in range(ranks)]


def _delayed(stage: int, ahead: int, micro_batches: int) -> list[moefw.Action]:
    order = [moefw.Action("F", stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            order.append(moefw.Action("F", stage, ahead + number))
        order.append(moefw.Action("I", stage, number))
        if number >= stage:
            order.append(moefw.Action("W", stage, number - stage))
    order += [moefw.Action("W", stage, number) for number in range(max(0, micro_batches - stage), micro_batches)]
    return order


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedule."""
    return [ZeroBubble]
