"""Memory use of a recorded micro-batch at each moment, with the layers added that did not run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import final

from attrs import frozen

from moefw.planner.micro_batch import MicroBatch
from moefw.planner.report import Peak
from moefw.recording.recorder import GATHERED, GRADIENTS
from moefw.runtime.pipeline.link import UNDER_WAY
from moefw.runtime.pipeline.transfers import Receive


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
    """Bytes in use, without parameters, buffers, tokens and pools. ``gradients``: those of earlier ones are there."""

    def __init__(self, batch: MicroBatch, *, gradients: bool) -> None:
        self._batch = batch
        change = batch.frees_gradients or not gradients
        self._kinds = (None, GATHERED, GRADIENTS) if change else (None, GATHERED)
        self._given = gradients
        changes = [0] * (batch.end + 1)
        for life in batch.recorder.lives:
            if life.kind in self._kinds:
                changes[life.began] += life.nbytes
                if life.ended <= batch.end:
                    changes[life.ended] -= life.nbytes
        self._bytes = list(accumulate(changes))
        self._others = list(self._not_run())
        self._beside = list(self._beyond_one(gradients))

    def _not_run(self) -> Iterator[_Others]:
        use = self._bytes
        for layer, forward, backward in self._batch.spans():
            saved = use[forward.stop] - use[forward.start]
            gradients = saved + use[backward.stop] - use[backward.start]
            yield _Others(layer.more * saved, layer.more * gradients, forward.start, backward)

    def _at(self, moment: int) -> int:
        """Return the bytes in use with one micro-batch in flight."""
        return self._bytes[moment] + sum(sum(one.at(moment)) for one in self._others)

    def _beyond_one(self, gradients: bool) -> Iterator[tuple[range, int]]:
        """Yield when each pass through a stage of a pipeline runs, and the most that is held beside it.

        That is saved by the micro-batches in flight, received for later passes, and under way. The first backward of a
        stage finds no ``gradients``, nor does a forward before all backwards.
        """
        batch, link = self._batch, self._batch.link
        if link is None:
            return
        own = {stage: self._at(span.stop) - self._at(span.start) for stage, span in batch.saved_in.items()}
        held, most = dict.fromkeys(own, 0), dict[tuple[str, int], int]()
        received, sent, begun = dict[tuple[str, int, int], int](), 0, set[int]()
        for step in batch.steps:
            kind, stage = "B" if step.kind == "I" else step.kind, step.stage
            if isinstance(step, Receive):
                received[kind, stage, step.micro_batch] = link.received[kind, stage]
                continue
            received.pop((kind, stage, step.micro_batch), None)
            found = stage in begun if kind == "B" else bool(begun)
            if kind != "W" and found is gradients:
                counted = [one for one in own if one < stage or (one == stage and kind == "B")]
                others = sum(held[one] * own[one] for one in own) - sum(own[one] for one in counted)
                others += sum(received.values()) + min(sent, UNDER_WAY) * link.sent
                most[kind, stage] = max(others, most.get((kind, stage), others))
            begun |= {stage} if kind == "B" else set()
            sent += kind != "W"
            held[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[step.kind]
        yield from ((batch.passes[key], others) for key, others in most.items())

    def _gradients_at(self, moment: int) -> int:
        alive = self._batch.recorder.alive(moment)
        return sum(life.nbytes for life in alive if life.kind == GRADIENTS and life.kind in self._kinds)

    def _beside_at(self, moment: int) -> int:
        """Return the most that is held beside the micro-batch at a moment."""
        return max((held for window, held in self._beside if window.start <= moment <= window.stop), default=0)

    def peak(self, all_gradients: int) -> Peak:
        """Return the peak of the micro-batch. ``all_gradients``: bytes of all gradients between micro-batches."""
        batch, recorder = self._batch, self._batch.recorder
        windows = [window for window, _ in self._beside] or [range(batch.begin, batch.end)]
        moments = [moment for window in windows for moment in range(window.start, window.stop + 1)]
        moment = max(moments, key=lambda at: self._at(at) + self._beside_at(at))
        alive = [life for life in recorder.alive(moment) if life.kind in self._kinds]
        kept = set(batch.saved())
        missing_saved, missing_gradients = map(sum, zip((0, 0), *(one.at(moment) for one in self._others), strict=True))
        by = {
            "gathered": sum(life.nbytes for life in alive if life.kind == GATHERED),
            "saved": sum(life.nbytes for life in alive if life.kind is None and life in kept),
            "passing": sum(life.nbytes for life in alive if life.kind is None and life not in kept),
        }
        place = max((life for life in recorder.lives if life.began <= moment), key=lambda life: life.began).made_in
        by["saved"] += missing_saved + self._beside_at(moment)
        gradients = missing_gradients + self._gradients_at(moment) - self._gradients_at(batch.begin)
        gradients -= 0 if self._given else all_gradients
        return Peak(place=str(place), operands=batch.operands(), gradients=gradients, **by)
