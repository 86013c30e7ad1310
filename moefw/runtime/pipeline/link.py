"""The way between the stages of a pipeline: tensors from rank to rank, over the group of pp."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.records import Action, Order, Stage
from moefw.runtime.pipeline.transfers import UNDER_WAY, Step, with_transfers

Direction = Literal["forward", "backward"]


@final
class Link:
    """Sends what a stage passes on to the rank of the next one. Both begin their transfers in the same order.

    ``by_rank``: the stages of each position on pp. ``order``: see :meth:`moefw.ModelContext.order`.
    """

    def __init__(
        self,
        layout: Layout,
        by_rank: Sequence[Sequence[Stage]],
        order: Callable[[int], Order],
    ) -> None:
        self.group = layout.group("pp")
        self.index = layout.index("pp")
        self._order = order
        rank_of = {stage: rank for rank, own in enumerate(by_rank) for stage in own}
        self.stages = sorted(rank_of, key=lambda stage: stage.index)
        self.rank_of = [rank_of[stage] for stage in self.stages]
        self.playing: Action | None = None
        """The pass that runs now; of a pair, that of the phase."""
        self._sent: deque[tuple[Sequence[Any], Sequence[Tensor]]] = deque()
        """Work handles of the sends under way, and their tensors, which must live until they have left."""
        self._steps: dict[int, Sequence[Step]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether one stage is the whole model."""
        return len(self.stages) == 1

    def steps(self, micro_batches: int) -> Sequence[Step]:
        """Passes, pairs and transfers of this rank, in order, in a step of so many micro-batches."""
        if micro_batches not in self._steps:
            listed = with_transfers(self._order(micro_batches), self.rank_of.__getitem__, len(self.stages))
            self._steps[micro_batches] = listed[self.index]
        return self._steps[micro_batches]

    def leaves(self, stage: int, direction: Direction = "forward") -> bool:
        """Whether what a stage passes on leaves its rank."""
        return self.rank_of[next_stage(stage, direction)] != self.rank_of[stage]

    def send(self, stage: int, direction: Direction, tensors: Sequence[Tensor], *, number: int = 0) -> None:
        """Begin to send what ``stage`` passes on of micro-batch ``number``.

        Waits for earlier ones: their receivers have begun, as both ends follow one order.
        """
        self._wait(UNDER_WAY - 1)
        peer = self.rank_of[next_stage(stage, direction)]
        sent = [tensor.detach().contiguous() for tensor in tensors]
        works = [
            dist.isend(tensor, group=self.group, group_dst=peer, tag=_tag(stage, direction, number, index))
            for index, tensor in enumerate(sent)
        ]
        self._sent.append((works, sent))

    def receive(
        self, stage: int, direction: Direction, buffers: tuple[Tensor, ...], *, number: int = 0
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to receive what ``stage`` awaits of micro-batch ``number``. Return a function that waits for it."""
        source = stage - 1 if direction == "forward" else stage + 1
        peer = self.rank_of[source]
        works: list[Any] = [
            dist.irecv(buffer, group=self.group, group_src=peer, tag=_tag(source, direction, number, index))
            for index, buffer in enumerate(buffers)
        ]
        return partial(self._arrived, works, buffers)

    def _arrived(self, works: Sequence[Any], buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for work in works:
            work.wait()
        return buffers

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until at most ``most`` sends are under way."""
        while len(self._sent) > most:
            works, _ = self._sent.popleft()
            for work in works:
                work.wait()

    def from_last(self, values: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
        """Fp32 ``values`` of the last stage on every rank of pp. Collective over pp.

        ``values``: those of a rank that has the last stage, None on all others. ``like`` is on the device of the rank.
        """
        buffer = torch.empty(shape, device=like.device) if values is None else values.float().contiguous()
        dist.broadcast(buffer, group=self.group, group_src=self.rank_of[-1])
        return buffer


def next_stage(stage: int, direction: Direction) -> int:
    """Stage that gets what ``stage`` passes on."""
    return stage + 1 if direction == "forward" else stage - 1


def _tag(stage: int, direction: Direction, number: int, index: int) -> int:
    """Tag that no other transfer under way has: of the tensor ``index`` that a stage passes on."""
    direction_number = 1 if direction == "backward" else 0
    return ((number * 1024 + stage) * 2 + direction_number) * 64 + index
