"""The sums of gradients over ranks that FSDP leaves, without running them, as gradients of most layers do not exist.

They restate :class:`moefw.runtime.parallel.gradients.Gradients`, against which tests hold them: of a family, large
gradients are summed one by one and all small ones in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

from moefw.core.contracts import Layout
from moefw.planner.measurement.micro_batch import FP32, MicroBatch
from moefw.runtime.parallel.gradients import SMALL, Family, Gradients


@final
class GradientSums:
    """The sums of the families of a model, in fp32."""

    def __init__(self, batch: MicroBatch, layout: Layout) -> None:
        self._batch = batch
        self._layout = layout
        self._families = Gradients(batch.model, layout).families
        self._main_gradients = batch.main_gradients()

    @property
    def buffers(self) -> int:
        """Bytes of all buffers of small gradients, which exist at the same time."""
        return sum(sum(self._sizes(family)[1]) for family in self._summed())

    def note(self) -> None:
        """Note their operators and transfers, as work of the phase ``gradients``."""
        with self._batch.recorder.places.phase("gradients"):
            for family in self._families:
                self._note_widening(family)
            for family in self._summed():
                self._note_sums(family)
            for family in self._families:
                if family.stages:
                    self._note_sum_over_stages(family)

    def _summed(self) -> Sequence[Family]:
        """Families that other ranks of a stage hold, too."""
        return [family for family in self._families if self._layout.size(*family.summed_over) > 1]

    def _sizes(self, family: Family) -> tuple[Sequence[int], Sequence[int]]:
        """Bytes of each large gradient, and of each small one."""
        sizes = [FP32 * prod(self._batch.stored(parameter)) for parameter in family.parameters]
        large = [nbytes for nbytes in sizes if nbytes > FP32 * SMALL]
        small = [nbytes for nbytes in sizes if nbytes <= FP32 * SMALL]
        return large, small

    def _note_widening(self, family: Family) -> None:
        """Note that gradients that micro-batches add up in fewer bits become fp32, but those that FSDP casts itself."""
        for parameter in family.parameters:
            if self._batch.is_sharded(parameter):
                continue
            narrow_bytes = self._main_gradients[parameter]
            fp32_bytes = FP32 * parameter.numel()
            if narrow_bytes < fp32_bytes:
                self._batch.operations.moved(narrow_bytes + fp32_bytes)

    def _note_sums(self, family: Family) -> None:
        ranks = self._layout.plan.group(self._layout.rank, family.summed_over)
        large, small = self._sizes(family)
        for nbytes in large:
            self._batch.operations.sent_to_all("all-reduce", ranks, nbytes)
        if small:
            self._note_in_one_buffer(sum(small), ranks)

    def _note_sum_over_stages(self, family: Family) -> None:
        ranks = self._layout.plan.group(self._layout.rank, ("pp",))
        holders = [ranks[position] for position in family.stages]
        nbytes = FP32 * sum(prod(self._batch.stored(parameter)) for parameter in family.parameters)
        self._note_in_one_buffer(nbytes, holders)

    def _note_in_one_buffer(self, nbytes: int, ranks: Sequence[int]) -> None:
        """Note a sum over ranks for which gradients are copied into a buffer, and back."""
        self._batch.operations.moved(2 * nbytes)
        self._batch.operations.sent_to_all("all-reduce", ranks, nbytes)
        self._batch.operations.moved(2 * nbytes)
