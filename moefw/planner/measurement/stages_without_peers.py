"""A rank's stages of a pipeline without the other ranks: one micro-batch passes through them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import torch.distributed as dist
from attrs import define
from torch import Tensor

from moefw.core.records import Action, Stage
from moefw.planner.measurement.operations import Operations
from moefw.runtime.pipeline.link import Direction, Link, next_stage
from moefw.runtime.pipeline.stage import ModelStage
from moefw.runtime.pipeline.transfers import Receive, Step

SENT: Final = "send"
"""The kind of a transfer to the next stage, or back."""


@define
class OwnStages:
    """The stages of a rank, and what takes the place of the transfers between them."""

    stages: Sequence[ModelStage]
    link: Link


@final
class Unconnected:
    """Takes the place of :class:`moefw.runtime.pipeline.link.Link`, without peers.

    What is received is in its buffers at once, without values. What is sent is noted, not kept: the player holds one
    micro-batch, and :mod:`moefw.planner.measurement.usage` adds the sends under way.
    """

    def __init__(self, link: Link, own: Sequence[Stage], operations: Operations) -> None:
        self.playing: Action | None = None
        self.received: dict[tuple[str, int], int] = {}
        """Bytes that forward and backward of each stage receive."""
        self.sent = 0
        """The most bytes that one pass sends."""
        self._link = link
        self._own = own
        self._operations = operations

    def steps(self, micro_batches: int) -> Sequence[Step]:
        """Passes of one micro-batch: forward through all stages of the rank, and back."""
        steps: list[Step] = []
        for stage in self._own:
            if not stage.is_first and self.leaves(stage.index - 1, "forward"):
                steps.append(Receive("F", stage.index, 0))
            steps.append(Action("F", stage.index, 0))
        for stage in reversed(self._own):
            if not stage.is_last and self.leaves(stage.index + 1, "backward"):
                steps.append(Receive("B", stage.index, 0))
            steps.append(Action("B", stage.index, 0))
        return steps

    def leaves(self, stage: int, direction: Direction) -> bool:
        """Whether what a stage passes on leaves its rank."""
        return self._link.leaves(stage, direction)

    def send(self, stage: int, direction: Direction, tensors: Sequence[Tensor], *, number: int = 0) -> None:
        """Note what is sent."""
        assert self._link.group is not None, "there are several stages"
        ranks = dist.get_process_group_ranks(self._link.group)
        peer = self._link.rank_of[next_stage(stage, direction)]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.sent = max(self.sent, nbytes)
        self._operations.sent(SENT, ranks, {peer: nbytes})

    def receive(
        self, stage: int, direction: Direction, buffers: tuple[Tensor, ...], *, number: int = 0
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Note what is received. Return a function that returns the buffers at once."""
        self.received["F" if direction == "forward" else "B", stage] = sum(buffer.nbytes for buffer in buffers)
        return lambda: buffers

    def flush(self) -> None:
        """Do nothing."""
