"""``merged``: without pp, the backward of a micro-batch beside the forward of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Order


@frozen
class Merged(PipelinePlugin):
    """One stage: forward and backward of neighbouring micro-batches run phase by phase, one beside the other.

    So each computes while rows of the other travel, as in DualPipe (arXiv 2412.19437). The first forward and the last
    backward run alone. About one micro-batch and one or two layers are held.
    """

    name: ClassVar[str] = "merged"

    @property
    def merges(self) -> bool:
        """True: all passes but two are in pairs."""
        return True

    def check_batches(self, ranks: int, micro_batches: int) -> Iterator[moefw.Problem]:
        """Yield a problem of several stages."""
        if ranks > 1:
            yield moefw.Problem(
                f"merged is a schedule of one stage, and pp is {ranks}.",
                "Use interleaved or dualpipe-v with merged: true, or a pp of 1.",
                "pipeline.use",
            )

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Order of one rank. Raises ValueError if there are several."""
        if ranks > 1:
            raise ValueError(f"merged is a schedule of one stage, and pp is {ranks}")
        pairs = [
            moefw.Pair(forward=moefw.Action("F", 0, number), backward=moefw.Action("B", 0, number - 1))
            for number in range(1, micro_batches)
        ]
        return [[moefw.Action("F", 0, 0), *pairs, moefw.Action("B", 0, micro_batches - 1)]]


@moefw.hookimpl
def moefw_pipelines() -> list[type[PipelinePlugin]]:
    """Declare the schedule."""
    return [Merged]
