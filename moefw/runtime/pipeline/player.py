"""Plays a schedule on this rank: passes of micro-batches through stages, and what travels between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moefw.core.records import Action, Entry, Pair
from moefw.core.stages import Batch, Output
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.phases import differentiable, first_uses, straight
from moefw.runtime.pipeline.in_flight import InFlight
from moefw.runtime.pipeline.link import Direction, next_stage
from moefw.runtime.pipeline.merging import merged
from moefw.runtime.pipeline.stage import Arrived, Passed, Pipelined
from moefw.runtime.pipeline.transfers import Receive

Key = tuple[int, int]
"""A stage and a micro-batch."""
Wait = Callable[[], Sequence[Any]]
"""Waits for tensors under way, and returns them."""
Around = Callable[[Action, Action | None], AbstractContextManager[None]]
"""Context of a pass, or of some phases of a pass and, second, its partner in a pair."""


@final
class Player:
    """Runs the micro-batches of one step through the stages of this rank.

    A player holds the graph of a micro-batch in a stage from forward to backward, and what its weight gradients need
    until their pass. A micro-batch runs phase by phase if one of its passes is in a pair, or with ``delay_wgrads``:
    weight gradients that have no pass of their own are then computed while rows travel. ``by_phase``: so do all others.
    ``new_wgrads`` makes the collection of each micro-batch whose weight gradients are computed later.

    ``when_finished`` is called with the parameters whose gradients no later pass changes, outside of passes and in an
    order that follows from the schedule alone: the last backward of each stage runs phase by phase for it. Those of
    several stages of this rank are left out.
    """

    def __init__(
        self,
        model: Pipelined,
        batches: Sequence[Batch],
        *,
        delay_wgrads: bool = False,
        by_phase: bool = False,
        new_wgrads: Callable[[], Wgrads] = Wgrads,
        when_finished: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        self.stages = {model_stage.stage.index: model_stage for model_stage in model.stages}
        self.link = model.link
        self.batches = batches
        self._steps = self.link.steps(len(batches))
        self._new_wgrads = new_wgrads
        self._when_finished = when_finished
        self._last = self._last_of_stages() if when_finished is not None else set()
        """The micro-batch of each stage whose backward is the last."""
        self._in_flight = dict(self._prepared(delay_wgrads=delay_wgrads, by_phase=by_phase))
        self._ends = self._ending_parameters()
        self._inputs: dict[Key, Wait] = {}
        self._grads: dict[Key, Wait] = {}
        self._outputs: list[Output | Passed] = []
        """The output of the forward that has just run."""
        self._passed: dict[Key, Sequence[Tensor]] = {}
        """Tensors without memory, like those passed on, whose gradients come back."""
        self._differentiable: dict[Key, Sequence[bool]] = {}
        """Whether each of them requires a gradient: none does behind stages in which all weights are frozen."""

    def _prepared(self, *, delay_wgrads: bool, by_phase: bool) -> Iterator[tuple[Key, InFlight]]:
        """Yield what will hold each micro-batch of each stage."""
        entries = [step for step in self._steps if not isinstance(step, Receive)]
        actions = [action for entry in entries for action in entry.passes]
        in_pairs = {_key(action) for entry in entries if isinstance(entry, Pair) for action in entry.passes}
        in_parts = {_key(action) for action in actions if action.kind == "I"}
        for key in dict.fromkeys(map(_key, actions)):
            phases = self.stages[key[0]].phases
            fills_movements = delay_wgrads and key not in in_parts
            ends_by_phase = key in self._last and key not in in_parts
            if not (by_phase or key in in_pairs or fills_movements or ends_by_phase):
                phases = (straight(phases),)
            wgrads = self._new_wgrads() if key in in_parts or fills_movements else None
            yield key, InFlight(phases, wgrads, fills_movements=fills_movements)

    def _last_of_stages(self) -> set[Key]:
        """The micro-batch of each stage whose backward is the last on this rank."""
        last: dict[int, Key] = {}
        for step in self._steps:
            if not isinstance(step, Receive):
                last |= {action.stage: _key(action) for action in step.passes if action.kind in ("B", "W")}
        return {*last.values()}

    def _ending_parameters(self) -> dict[Key, list[list[nn.Parameter]]]:
        """For the last micro-batch of each stage, the parameters whose gradients end with each phase of backward."""
        ends = {key: first_uses(self._in_flight[key].phases) for key in sorted(self._last)}
        num_stages = Counter(parameter for phases in ends.values() for used in phases for parameter in used)
        return {
            key: [[parameter for parameter in used if num_stages[parameter] == 1] for used in phases]
            for key, phases in ends.items()
        }

    def play(self, around: Around) -> Iterator[tuple[Entry, Output | Passed | None]]:
        """Yield what has run, one by one: a pass or a pair, and the output of its forward, without graph and tensors.

        Each pass runs in the context ``around`` it, and in a pair each run of phases of one pass.
        """
        for step in self._steps:
            if isinstance(step, Receive):
                self._receive(step.kind, _key(step))
                continue
            if isinstance(step, Pair):
                self._run_pair(step, around)
            else:
                self._run(step, around)
            yield step, self._outputs.pop() if self._outputs else None
        self.link.playing = None
        self.link.flush()

    def _run(self, action: Action, around: Around) -> None:
        key = _key(action)
        self.link.playing = action
        in_flight = self._in_flight[key]
        if action.kind == "F":
            with around(action, None):
                self._begin_forward(key)
                for _ in in_flight.phases:
                    in_flight.forward()
                self._end_forward(key)
            return
        if action.kind == "W":
            with around(action, None):
                self._run_wgrads(key)
        elif key in self._last:
            with around(action, None):
                self._begin_backward(key)
            for _ in in_flight.phases:
                with around(action, None):
                    in_flight.backward()
                self._tell_finished(key, in_flight)
            with around(action, None):
                self._end_backward(key)
        else:
            with around(action, None):
                self._begin_backward(key)
                for _ in in_flight.phases:
                    in_flight.backward()
                self._end_backward(key)
        self._tell_finished(key, in_flight)

    def _tell_finished(self, key: Key, in_flight: InFlight) -> None:
        """Tell the parameters whose gradients have ended since the last time."""
        if key in self._ends and self._when_finished is not None:
            parameters = [parameter for number in in_flight.finished for parameter in self._ends[key][number]]
            if parameters:
                self._when_finished(parameters)
        in_flight.finished.clear()

    def _run_pair(self, pair: Pair, around: Around) -> None:
        """Run a forward and a backward phase by phase. What both make is sent behind both.

        Weight gradients that wait for a movement which does not come are computed last, behind these sends.
        """
        forward, backward = pair.passes
        self.link.playing = forward
        with around(forward, backward):
            ahead = self._begin_forward(_key(forward))
        self.link.playing = backward
        with around(backward, forward):
            back = self._begin_backward(_key(backward))
        for kind, phases in groupby(merged(ahead.phases, back.phases)):
            action, partner = (forward, backward) if kind == "F" else (backward, forward)
            self.link.playing = action
            with around(action, partner):
                for _ in phases:
                    if kind == "F":
                        ahead.forward()
                    else:
                        back.backward()
            self._tell_finished(_key(backward), back)
        with around(forward, backward):
            self._end_forward(_key(forward))
        with around(backward, forward):
            self._end_backward(_key(backward))
        self._tell_finished(_key(backward), back)

    def _run_wgrads(self, key: Key) -> None:
        self._in_flight.pop(key).run_wgrads()

    def _receive(self, kind: str, key: Key) -> None:
        stage, number = key
        if kind == "F":
            buffers = self.stages[stage].awaited(self.batches[number])
            self._inputs[key] = self.link.receive(stage, "forward", buffers, number=number)
        else:
            device = self.batches[number].ids_BS.device
            buffers = tuple(torch.empty_like(like, device=device) for like in self._passed.pop(key))
            self._grads[key] = self.link.receive(stage, "backward", buffers, number=number)

    def _begin_forward(self, key: Key) -> InFlight:
        """Wait for the input of a forward."""
        _, number = key
        arrived = tuple(tensor.requires_grad_() for tensor in self._inputs.pop(key, list)())
        in_flight = self._in_flight[key]
        in_flight.begin_forward(Arrived(batch=self.batches[number], tensors=arrived))
        return in_flight

    def _end_forward(self, key: Key) -> None:
        """Pass the output of a forward on. Behind the last stage, prepare the gradients of its backward."""
        stage, number = key
        output: Output | Passed = self._in_flight[key].end_forward()
        if isinstance(output, Passed):
            self._passed[key] = [torch.empty_like(tensor, device="meta") for tensor in output.tensors]
            self._differentiable[key] = [tensor.requires_grad for tensor in output.tensors]
            self._pass_on(stage, "forward", output.tensors, number=number, inbox=self._inputs)
            self._outputs.append(replace(output, tensors=()))
            return
        # The last stage: backward begins with the scale of the loss as the gradient of each of its terms.
        scale = self.batches[number].loss_scale
        scales = [scale for _ in differentiable(output)]
        self._grads[key] = lambda: scales
        without_graph: Output = tree_map_only(Tensor, torch.detach, output)
        self._outputs.append(without_graph)

    def _begin_backward(self, key: Key) -> InFlight:
        """Wait for the gradients with which a backward begins."""
        in_flight = self._in_flight[key]
        grads = self._grads.pop(key)()
        if key in self._differentiable:
            grads = [grad for grad, takes in zip(grads, self._differentiable.pop(key), strict=True) if takes]
        in_flight.begin_backward(grads)
        return in_flight

    def _end_backward(self, key: Key) -> None:
        """Pass the gradients of a stage's input on. Forget the micro-batch, if no pass of weight gradients follows."""
        in_flight = self._in_flight[key]
        self._pass_back(key, in_flight.end_backward())
        if not in_flight.leaves_wgrads:
            in_flight.run_wgrads()
            del self._in_flight[key]

    def _pass_back(self, key: Key, input_grads: Sequence[Tensor | None]) -> None:
        """Pass the gradients of a stage's input on to the stage before."""
        stage, number = key
        if self.stages[stage].stage.is_first:
            return
        if any(grad is None for grad in input_grads):  # what arrived did not reach the loss
            buffers = self.stages[stage].awaited(self.batches[number])
            input_grads = [
                buffer.zero_() if grad is None else grad for grad, buffer in zip(input_grads, buffers, strict=True)
            ]
        passed = cast("Sequence[Tensor]", input_grads)
        self._pass_on(stage, "backward", passed, number=number, inbox=self._grads)

    def _pass_on(
        self, stage: int, direction: Direction, tensors: Sequence[Tensor], *, number: int, inbox: dict[Key, Wait]
    ) -> None:
        """Send tensors of a micro-batch to the next stage, or put them into its inbox if it is on this rank."""
        if self.link.leaves(stage, direction):
            self.link.send(stage, direction, tensors, number=number)
            return
        passed = [tensor.detach() for tensor in tensors]
        inbox[next_stage(stage, direction), number] = lambda: passed


def _key(step: Action | Receive) -> Key:
    return step.stage, step.micro_batch
