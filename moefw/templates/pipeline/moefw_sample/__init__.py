"""``sample``: a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.PipelinePlugin):
    """All forwards of a step, then all backwards, the last micro-batch first."""

    name: ClassVar[str] = "sample"

    def order(self, ranks: int, micro_batches: int) -> Sequence[Sequence[moefw.Action]]:
        """What each rank runs. It waits at each pass for the tensors that the pass needs."""
        numbers = range(micro_batches)
        return [
            [
                *(moefw.Action("F", rank, number) for number in numbers),
                *(moefw.Action("B", rank, number) for number in reversed(numbers)),
            ]
            for rank in range(ranks)
        ]


@moefw.hookimpl
def moefw_pipelines() -> list[type[moefw.PipelinePlugin]]:
    """Declare the schedule."""
    return [Sample]
