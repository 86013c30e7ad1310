"""Memory use of a recorded micro-batch at each moment, with what was not run added by arithmetic.

Layers that did not run are added (:class:`_LayersNotRun`), and, in a pipeline, the micro-batches that are in flight
beside the recorded one (:meth:`Usage._bytes_beside_passes`). What a rank holds all the time is in
:class:`moefw.planner.report.Held`. A moment is a number of changes of the memory in use, as in
:class:`moefw.recording.recorder.Recorder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import final

from attrs import frozen

from moefw.core.records import Action, Entry, Pair
from moefw.planner.measurement.micro_batch import MicroBatch
from moefw.planner.report import Peak
from moefw.recording.recorder import GATHERED, GRADIENTS, REDUCED, Life
from moefw.runtime.pipeline.merging import merged
from moefw.runtime.pipeline.timeline import CHANGE_IN_FLIGHT
from moefw.runtime.pipeline.transfers import UNDER_WAY, Receive, taken_by


@frozen(order=True)
class _Place:
    """Where a rank is in the phases of its stages: a stage, and a phase of those that run, both by number."""

    stage: int
    phase: int


@frozen
class _LayerBytes:
    """Bytes of layers that did not run: what they saved for backward, and their gradients."""

    saved: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.saved + self.gradients

    def plus(self, other: _LayerBytes) -> _LayerBytes:
        """Bytes of both."""
        return _LayerBytes(self.saved + other.saved, self.gradients + other.gradients)


@frozen
class _LayersNotRun:
    """The layers that did not run and that one recorded layer stands for: ``number`` of them.

    With U(t) the bytes in use at moment t, each of them has:

    - ``saved`` = U(end of forward) - U(begin of forward): what forward of the recorded layer left for backward;
    - ``gradients`` = ``saved`` + U(end of backward) - U(begin of backward): backward freed what was saved, so the
      rest of its change is that of gradients. It is negative where gradients of earlier micro-batches are freed.

    ``since``: the begin of the recorded layer's forward. ``backward``: the moments of its backward. ``first`` and
    ``last``: the places of its phases.
    """

    number: int
    saved: int
    gradients: int
    since: int
    backward: range
    first: _Place
    last: _Place

    def at(self, moment: int) -> _LayerBytes:
        """Most bytes that these layers hold at a moment of a pass that runs from end to end.

        The recorded layer may be any of the row. In forward it counts as the last one: what the others save is there
        from its begin on. In backward, j of the n others are done and hold gradients, and n - j hold what they saved.
        The sum is linear in j, so its maximum is at one end: only the larger of both counts.
        """
        if moment < self.since:
            return _LayerBytes()
        if moment >= self.backward.stop:
            return self._bytes(done=self.number)
        if moment >= self.backward.start and self.gradients > self.saved:
            return self._bytes(done=self.number)
        return self._bytes(waiting=self.number)

    def in_phase(self, place: _Place, behind: int, *, in_backward: bool) -> _LayerBytes:
        """Bytes that these layers hold while the phase at a place runs, and at the boundary before it.

        ``behind``: the number of layers of the row behind the one of this phase, where the recorded layer takes turns
        as each of them. A moment does not say that: one at which a layer begins is the last of the layer before, too.
        """
        if place < self.first:
            return self._bytes(done=self.number if in_backward else 0)
        if place > self.last:
            return self._bytes(waiting=self.number)
        return self._bytes(waiting=self.number - behind, done=behind if in_backward else 0)

    def _bytes(self, *, waiting: int = 0, done: int = 0) -> _LayerBytes:
        """Bytes of layers that wait for their backward, and of layers that are done with it."""
        return _LayerBytes(saved=waiting * self.saved, gradients=done * self.gradients)


@frozen
class _Span:
    """Moments of a recorded pass, or of one of its phases, in a schedule, and the bytes that are held beside it.

    ``layers``: what layers that did not run hold meanwhile; None: it depends on the moment.
    """

    moments: range
    beside: int
    layers: _LayerBytes | None = None

    @property
    def constant(self) -> int:
        """Bytes that are the same at all of these moments."""
        return self.beside + (self.layers.total if self.layers else 0)

    def every(self) -> range:
        """The moments with both ends: a pass may have its peak in its last one, which is the first of the next."""
        return range(self.moments.start, self.moments.stop + 1)


@final
class Usage:
    """Bytes in use from the begin to the end of a recorded micro-batch.

    Parameters, buffers, tokens, operands that micro-batches share, and pools do not count. ``gradients``: whether
    gradients of earlier micro-batches exist when this one begins. ``without``: a region whose backward is left out.
    """

    def __init__(self, batch: MicroBatch, *, gradients: bool, without: str | None = None) -> None:
        self._batch = batch
        self._without = without
        self._gradients_exist = gradients
        self._counted_kinds: tuple[str | None, ...] = (None, GATHERED, REDUCED)
        # Gradients that stay as they are count in Held.gradients alone. They change only if this micro-batch is the
        # first that makes them, or the last one of a step, which reduces and frees those of all.
        if batch.frees_gradients or not gradients:
            self._counted_kinds = (None, GATHERED, REDUCED, GRADIENTS)
        self._recorded_bytes = self._sum_of_changes(self._counted_kinds)
        # Of a micro-batch beside another one: both use the same gathered weights.
        self._bytes_of_its_own = self._sum_of_changes(kind for kind in self._counted_kinds if kind != GATHERED)
        self._reduced_bytes = self._sum_of_changes((REDUCED,))
        self._not_run = list(self._layers_not_run())
        self._beside = list(self._bytes_beside_passes(begin_with_gradients=gradients))

    def _sum_of_changes(self, kinds: Iterable[str | None]) -> list[int]:
        """Bytes in use at each moment up to the end, of the storages of these kinds that were recorded."""
        counted = set(kinds)
        end = self._batch.end
        changes = [0] * (end + 1)
        for life in self._batch.recorder.lives:
            is_left_out = life.made_in.region == self._without and life.began > self._batch.turn
            if life.kind in counted and not is_left_out:
                changes[life.began] += life.nbytes
                if life.ended <= end:
                    changes[life.ended] -= life.nbytes
        return list(accumulate(changes))

    def _layers_not_run(self) -> Iterator[_LayersNotRun]:
        in_use = self._recorded_bytes
        for stage, recorded_stage in self._batch.stages.items():
            for layer, phases in recorded_stage.standing_for_others():
                forward = recorded_stage.forward_of(phases[0], last=phases[-1])
                backward = recorded_stage.backward_of(phases[0], last=phases[-1])
                saved = in_use[forward.stop] - in_use[forward.start]
                gradients = saved + in_use[backward.stop] - in_use[backward.start]
                yield _LayersNotRun(
                    number=layer.more,
                    saved=saved,
                    gradients=gradients,
                    since=forward.start,
                    backward=backward,
                    first=_Place(stage, phases[0]),
                    last=_Place(stage, phases[-1]),
                )

    def _layers_at(self, moment: int) -> _LayerBytes:
        """What all layers that did not run hold at a moment of a pass that runs from end to end."""
        return _sum(layers.at(moment) for layers in self._not_run)

    def _layers_in_phase(self, place: _Place, behind: int, *, in_backward: bool) -> _LayerBytes:
        """What all layers that did not run hold while a phase of a pair runs."""
        return _sum(layers.in_phase(place, behind, in_backward=in_backward) for layers in self._not_run)

    def _at(self, moment: int) -> int:
        """Bytes in use at a moment, of the recorded micro-batch in all layers."""
        return self._recorded_bytes[moment] + self._layers_at(moment).total

    def _in(self, span: _Span, moment: int) -> int:
        """Bytes in use at a moment of a span, of all micro-batches."""
        if span.layers is None:
            return self._at(moment) + span.beside
        return self._recorded_bytes[moment] + span.constant

    def own_at(self, moment: int) -> int:
        """The same without gathered weights."""
        return self._bytes_of_its_own[moment] + self._layers_at(moment).total

    def lasting_at(self, moment: int) -> int:
        """The same without inputs of reductions."""
        return self.own_at(moment) - self._reduced_bytes[moment]

    def reduced_at(self, moment: int) -> int:
        """Bytes in use at a moment of inputs of reductions."""
        return self._reduced_bytes[moment]

    def most_in(self, moments: range, *, without_reduced: bool = False) -> int:
        """Most bytes in use between two moments, of the recorded micro-batch in all layers."""
        in_use = self._without_reduced_at if without_reduced else self._at
        return max(in_use(moment) for moment in range(moments.start, moments.stop + 1))

    def _without_reduced_at(self, moment: int) -> int:
        return self._at(moment) - self._reduced_bytes[moment]

    def reduction_in(self, moments: range) -> range:
        """The part of a pass from its first reduction on, which frees the input of the one before; empty: none."""
        inputs = [life for life in self._batch.recorder.lives if life.kind == REDUCED]
        begun = [life.began for life in inputs if life.began in moments]
        freed = [life.ended for life in inputs if life.began < moments.start <= life.ended < moments.stop]
        return range(min(begun + freed), moments.stop) if begun else range(moments.stop, moments.stop)

    def _bytes_beside_passes(self, *, begin_with_gradients: bool) -> Iterator[_Span]:
        """Yield the moments of each recorded pass of a pipeline, with the most bytes that are held beside it.

        One micro-batch was recorded: forward through the stages of this rank, in their order, and back. Here the whole
        schedule of the rank is played without running it. Before each pass, with m(s) the micro-batches in flight in
        stage s, and saved(s) the bytes that each of them leaves there, measured over the recorded forward of s:

            beside = sum of m(s) saved(s) over all stages of the rank
                     - sum of saved(s) over the stages in which the recorded micro-batch is in flight at this pass
                     + what was received for later passes + what is still being sent

        The second sum is in the recording already. The schedule has each recorded pass once for each micro-batch; the
        largest value counts, also over the phases of a pass in a pair, whose partner holds more or less as it goes on.
        Passes of weight gradients are not recorded. Only those passes count that begin with gradients of earlier ones,
        or only those that begin without: the first backward of a stage does, and so does a forward before all
        backwards. Yields nothing without a schedule.
        """
        link = self._batch.link
        if link is None:
            return
        spans = self._batch.saved_in
        saved = {stage: self.own_at(span.stop) - self.own_at(span.start) for stage, span in spans.items()}
        in_flight = dict.fromkeys(saved, 0)
        most: dict[tuple[int, int], _Span] = {}
        received: dict[Receive, int] = {}
        num_sends = 0
        stages_with_gradients: set[int] = set()
        for step in self._batch.steps:
            if isinstance(step, Receive):
                received[step] = link.received[step.kind, step.stage]
                continue
            for action in step.passes:
                received.pop(taken_by(action), None)
            others = sum(in_flight[own] * saved[own] for own in saved)
            others += sum(received.values())
            others += min(num_sends, UNDER_WAY) * link.sent
            counted = [
                action
                for action in step.passes
                if action.kind != "W" and self._has_gradients(action, stages_with_gradients) is begin_with_gradients
            ]
            for action in counted:
                own_bytes = _recorded_in_flight(saved, action)
                for span in self._spans(step, action, saved, beside=others - own_bytes):
                    ends = span.moments.start, span.moments.stop
                    most[ends] = max(span, most.get(ends, span), key=_constant)
            for action in step.passes:
                if _recorded_kind(action) == "B":
                    stages_with_gradients.add(action.stage)
                if action.kind != "W":
                    num_sends += 1
                in_flight[action.stage] += CHANGE_IN_FLIGHT[action.kind]
        yield from most.values()

    def _spans(self, step: Entry, action: Action, saved: Mapping[int, int], *, beside: int) -> Iterator[_Span]:
        """Yield the spans of a recorded pass of a step: the whole pass, or its phases where it is in a pair.

        ``beside``: bytes beside the pass in which its partner, if it is a forward, counts as not begun, and if it is a
        backward as all that its forward saved. At a phase of a pair the partner is somewhere between.
        """
        if not isinstance(step, Pair):
            yield _Span(self._batch.passes[_recorded_kind(action), action.stage], beside)
            return
        place = partial(_Place, action.stage)
        ahead = self._batch.stages[step.forward.stage]
        back = self._batch.stages[step.backward.stage]
        saved_before = sum(saved[own] for own in saved if own < step.backward.stage)
        phases_ahead = ahead.whole()
        phases_back = back.whole()
        done_ahead = 0
        left_back = len(phases_back)
        order = merged(
            [ahead.phases[number] for number, _ in phases_ahead], [back.phases[number] for number, _ in phases_back]
        )
        for kind in order:
            if kind == "F":
                if action is step.forward:
                    number, behind = phases_ahead[done_ahead]
                    partner = self._level(step.backward, phases_back, left_back)
                    partner -= saved_before + saved[step.backward.stage]
                    layers = self._layers_in_phase(place(number), behind, in_backward=False)
                    yield _Span(ahead.forward_of(number), beside + partner, layers)
                done_ahead += 1
            else:
                left_back -= 1
                if action is step.backward:
                    number, behind = phases_back[left_back]
                    partner = self._level(step.forward, phases_ahead, done_ahead)
                    partner -= self._level(step.forward, phases_ahead, 0)
                    layers = self._layers_in_phase(place(number), behind, in_backward=True)
                    yield _Span(back.backward_of(number), beside + partner, layers)

    def _level(self, action: Action, phases: Sequence[tuple[int, int]], boundary: int) -> int:
        """Bytes without gathered weights when a pass is at a boundary between the phases of its whole stage."""
        stage = self._batch.stages[action.stage]
        in_backward = action.kind != "F"
        moments = stage.backward if in_backward else stage.forward
        number, behind = phases[boundary] if boundary < len(phases) else (len(stage.phases), 0)
        layers = self._layers_in_phase(_Place(action.stage, number), behind, in_backward=in_backward)
        return self._bytes_of_its_own[moments[number]] + layers.total

    @staticmethod
    def _has_gradients(action: Action, stages_with_gradients: set[int]) -> bool:
        """Whether gradients of earlier micro-batches exist when a pass begins: in a backward, those of its stage."""
        if action.kind == "F":
            return bool(stages_with_gradients)
        return action.stage in stages_with_gradients

    def _counted_at(self, moment: int) -> list[Life]:
        """Recorded storages in use at a moment, of the kinds that count."""
        return [life for life in self._batch.recorder.alive(moment) if life.kind in self._counted_kinds]

    def _gradients_at(self, moment: int) -> int:
        """Bytes of recorded gradients at a moment; 0 where they stay as they are."""
        return sum(life.nbytes for life in self._counted_at(moment) if life.kind == GRADIENTS)

    def most_before_gradients(self) -> int:
        """Bound of :attr:`Peak.total` over the passes of a schedule that begin without gradients; 0: there are none.

        It is what they would need if they began with all gradients, as the recording did: no less, since what they add
        to the gradients is part of these.
        """
        spans = self._bytes_beside_passes(begin_with_gradients=False)
        in_use = [self._in(span, moment) for span in spans for moment in span.every()]
        return self._batch.operands() + max(in_use) - self._gradients_at(self._batch.begin) if in_use else 0

    def peak(self, all_gradients: int) -> Peak:
        """Peak of the micro-batch, and its terms in bytes.

        ``all_gradients``: bytes of all gradients of the rank between micro-batches, which Held.gradients counts all the
        time. So the term ``gradients`` is the difference to them: bytes of gradients at the peak, less those at the
        begin if gradients of earlier micro-batches existed there, and less ``all_gradients`` if none did.
        """
        batch = self._batch
        spans = self._beside or [_Span(range(batch.begin, batch.end), beside=0)]
        moments = ((span, moment) for span in spans for moment in span.every())
        span, moment = max(moments, key=lambda each: self._in(*each))
        alive = self._counted_at(moment)
        left_for_backward = set(batch.saved())
        unlabelled = [life for life in alive if life.kind in (None, REDUCED)]
        layers = self._layers_at(moment) if span.layers is None else span.layers
        gathered = sum(life.nbytes for life in alive if life.kind == GATHERED)
        saved = sum(life.nbytes for life in unlabelled if life in left_for_backward)
        saved += layers.saved + span.beside
        passing = sum(life.nbytes for life in unlabelled if life not in left_for_backward)
        gradients = self._gradients_at(moment) - self._gradients_at(batch.begin)
        gradients += layers.gradients
        if not self._gradients_exist:
            gradients -= all_gradients
        last_allocated = max((life for life in batch.recorder.lives if life.began <= moment), key=_began)
        return Peak(
            place=str(last_allocated.made_in),
            operands=batch.operands(),
            saved=saved,
            gathered=gathered,
            passing=passing,
            gradients=gradients,
        )


def _recorded_kind(action: Action) -> str:
    """Kind of the recorded pass: both backwards, ``B`` and ``I``, are recorded as one."""
    return "B" if action.kind == "I" else action.kind


def _recorded_in_flight(saved: Mapping[int, int], action: Action) -> int:
    """Bytes of the recorded micro-batch itself, at a pass, in the stages of this rank.

    In its forward through a stage, it is in flight in the stages before; in its backward, in this one, too. It has gone
    back through those behind.
    """
    before = sum(saved[own] for own in saved if own < action.stage)
    return before if action.kind == "F" else before + saved[action.stage]


def _sum(parts: Iterable[_LayerBytes]) -> _LayerBytes:
    return reduce(_LayerBytes.plus, parts, _LayerBytes())


def _constant(span: _Span) -> int:
    return span.constant


def _began(life: Life) -> int:
    return life.began
