"""Memory use of a recorded micro-batch at each moment, with the layers added that did not run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import final

from attrs import frozen

from moefw.planner.micro_batch import GRADIENTS, MicroBatch
from moefw.planner.report import Peak
from moefw.recording.recorder import GATHERED


@frozen
class _Others:
    """Layers that did not run: bytes that they save from moment ``since``, and bytes of their gradients."""

    saved: int
    gradients: int
    since: int
    backward: range

    def at(self, moment: int) -> tuple[int, int]:
        """Return their saved bytes and those of their gradients. In their own backward, only the larger counts."""
        if moment < self.since:
            return 0, 0
        done = moment >= self.backward.stop or (moment >= self.backward.start and self.gradients > self.saved)
        return (0, self.gradients) if done else (self.saved, 0)


@final
class Usage:
    """Bytes in use, without parameters, buffers, tokens and pools. ``gradients``: without gradients, too."""

    def __init__(self, batch: MicroBatch, *, gradients: bool) -> None:
        self._batch = batch
        self._kinds = (None, GATHERED) if gradients else (None, GATHERED, GRADIENTS)
        changes = [0] * (batch.end + 1)
        for life in batch.recorder.lives:
            if life.kind in self._kinds:
                changes[life.began] += life.nbytes
                if life.ended <= batch.end:
                    changes[life.ended] -= life.nbytes
        self._bytes = list(accumulate(changes))
        self._others = list(self._not_run())

    def _not_run(self) -> Iterator[_Others]:
        use = self._bytes
        for layer, forward, backward in self._batch.spans():
            saved = use[forward.stop] - use[forward.start]
            gradients = saved + use[backward.stop] - use[backward.start]
            yield _Others(layer.more * saved, layer.more * gradients, forward.start, backward)

    def peak(self, all_gradients: int) -> Peak:
        """Return the peak of the micro-batch. ``all_gradients``: bytes of all gradients at its end."""
        batch, recorder = self._batch, self._batch.recorder
        moments = range(batch.begin, batch.end + 1)
        moment = max(moments, key=lambda at: self._bytes[at] + sum(map(sum, (one.at(at) for one in self._others))))
        alive = [life for life in recorder.alive(moment) if life.kind in self._kinds]
        kept = set(batch.saved())
        missing_saved, missing_gradients = map(sum, zip((0, 0), *(one.at(moment) for one in self._others), strict=True))
        by = {
            "gathered": sum(life.nbytes for life in alive if life.kind == GATHERED),
            "saved": sum(life.nbytes for life in alive if life.kind is None and life in kept),
            "passing": sum(life.nbytes for life in alive if life.kind is None and life not in kept),
        }
        there = sum(life.nbytes for life in alive if life.kind == GRADIENTS) + missing_gradients
        place = max((life for life in recorder.lives if life.began <= moment), key=lambda life: life.began).made_in
        by["saved"] += missing_saved
        return Peak(place=str(place), gradients=there - all_gradients if GRADIENTS in self._kinds else 0, **by)
