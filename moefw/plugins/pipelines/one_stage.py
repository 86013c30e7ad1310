"""``gpipe``, ``1f1b`` and ``zero-bubble``: one stage a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Order


@frozen
class GPipe(PipelinePlugin):
    """All forwards of a step, then all backwards (arXiv 1811.06965). Holds every micro-batch of a step."""

    name: ClassVar[str] = "gpipe"
    left_out: ClassVar[Mapping[str, str]] = {
        "merged": "gpipe has run all forwards before the first backward. Use interleaved or dualpipe-v."
    }

    def order(self, ranks: int, micro_batches: int) -> Order:
        """All forwards, then all backwards, for each rank."""
        return [_alternating(rank, micro_batches, micro_batches) for rank in range(ranks)]


@frozen
class OneForwardOneBackward(PipelinePlugin):
    """Forwards and backwards alternate (arXiv 2006.09503). Holds at most as many micro-batches as there are stages."""

    name: ClassVar[str] = "1f1b"
    left_out: ClassVar[Mapping[str, str]] = {
        "merged": "With a pp of 8 and 64 micro-batches, 1f1b would idle 52 % of the time in place of 10 %, or hold 16 "
        "micro-batches in place of 8. Use interleaved or dualpipe-v."
    }

    def order(self, ranks: int, micro_batches: int) -> Order:
        """One forward for each later rank, then forwards and backwards in turn."""
        return _one_forward_one_backward(ranks, micro_batches)


@frozen
class ZeroBubble(PipelinePlugin):
    """ZB-H1 (arXiv 2401.10241): like ``1f1b``, with weight gradients in what would be idle time.

    On every rank as many micro-batches as ranks wait for a part of their backward.
    """

    name: ClassVar[str] = "zero-bubble"
    left_out: ClassVar[Mapping[str, str]] = {
        "merged": "With a pp of 8 and 64 micro-batches, zero-bubble would idle 28 % of the time in place of 4 %, or "
        "hold 16 micro-batches in place of 8. Use interleaved or dualpipe-v."
    }

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Order of ``1f1b``. Weight gradients of rank r wait for those of inputs of r more micro-batches."""
        orders = _one_forward_one_backward(ranks, micro_batches)
        return [list(_delayed(rank, order, micro_batches)) for rank, order in enumerate(orders)]


def _one_forward_one_backward(ranks: int, micro_batches: int) -> list[list[moefw.Action]]:
    """Passes of each rank in 1F1B."""
    return [_alternating(rank, min(ranks - 1 - rank, micro_batches), micro_batches) for rank in range(ranks)]


def _alternating(stage: int, ahead: int, micro_batches: int) -> list[moefw.Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = [moefw.Action("F", stage, micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(micro_batches):
        if ahead + micro_batch < micro_batches:
            order.append(moefw.Action("F", stage, ahead + micro_batch))
        order.append(moefw.Action("B", stage, micro_batch))
    return order


def _delayed(stage: int, order: Sequence[moefw.Action], micro_batches: int) -> Iterator[moefw.Action]:
    """Yield passes with each backward in two parts, the second behind the first of ``stage`` more micro-batches."""
    for action in order:
        if action.kind == "F":
            yield action
            continue
        yield moefw.Action("I", stage, action.micro_batch)
        if action.micro_batch >= stage:
            yield moefw.Action("W", stage, action.micro_batch - stage)
    for micro_batch in range(max(0, micro_batches - stage), micro_batches):
        yield moefw.Action("W", stage, micro_batch)


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedules."""
    return [GPipe, OneForwardOneBackward, ZeroBubble]
