"""Plays a schedule on this rank: passes of micro-batches through stages, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moefw.core.records import Action
from moefw.core.stages import Batch, Output
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.phases import PhaseCall
from moefw.runtime.pipeline.link import Direction, next_stage
from moefw.runtime.pipeline.stage import Arrived, Passed, Pipelined
from moefw.runtime.pipeline.transfers import Receive

Key = tuple[int, int]
"""A stage and a micro-batch."""
Wait = Callable[[], Sequence[Any]]
"""Waits for tensors under way, and returns them."""


@final
class Player:
    """Runs the micro-batches of one step through the stages of this rank.

    A player holds the graph of a micro-batch in a stage from forward to backward, and what its weight gradients need
    until their pass.
    """

    def __init__(self, model: Pipelined, batches: Sequence[Batch]) -> None:
        self.stages = {model_stage.stage.index: model_stage for model_stage in model.stages}
        self.link = model.link
        self.batches = batches
        self._calls: dict[Key, PhaseCall] = {}
        self._wgrads: dict[Key, Wgrads] = {}
        self._inputs: dict[Key, Wait] = {}
        self._grads: dict[Key, Wait] = {}
        self._outputs: list[Output | Passed] = []
        self._passed: dict[Key, Sequence[Tensor]] = {}
        """Tensors without memory, like those passed on, whose gradients come back."""

    def play(self, around: Callable[[Action], AbstractContextManager[None]]) -> Iterator[tuple[int, Output | Passed]]:
        """Yield the micro-batch and the output, without graph and tensors, of each forward on this rank.

        Each pass runs in the context ``around`` it.
        """
        steps = self.link.steps(len(self.batches))
        self._wgrads = {(step.stage, step.micro_batch): Wgrads() for step in steps if step.kind == "I"}
        for step in steps:
            key = step.stage, step.micro_batch
            if isinstance(step, Receive):
                self._receive(step.kind, key)
                continue
            self.link.playing = step
            with around(step):
                if step.kind == "F":
                    self._outputs.append(self._forward(key))
                elif step.kind == "W":
                    self._wgrads.pop(key).run()
                else:
                    self._backward(key)
            if self._outputs:
                yield step.micro_batch, self._outputs.pop()
        self.link.playing = None
        self.link.flush()

    def _receive(self, kind: str, key: Key) -> None:
        stage, number = key
        if kind == "F":
            buffers = self.stages[stage].awaited(self.batches[number])
            self._inputs[key] = self.link.receive(stage, "forward", buffers, number=number)
        else:
            device = self.batches[number].ids_BS.device
            buffers = tuple(torch.empty_like(like, device=device) for like in self._passed.pop(key))
            self._grads[key] = self.link.receive(stage, "backward", buffers, number=number)

    def _forward(self, key: Key) -> Output | Passed:
        stage, number = key
        batch = self.batches[number]
        call = PhaseCall()
        arrived = tuple(tensor.requires_grad_() for tensor in self._inputs.pop(key, list)())
        with self._collected(key):
            output: Output | Passed = call.run(self.stages[stage].run, Arrived(batch=batch, tensors=arrived))
        self._calls[key] = call
        if isinstance(output, Passed):
            self._passed[key] = [torch.empty_like(tensor, device="meta") for tensor in output.tensors]
            self._pass_on(stage, "forward", output.tensors, number=number, inbox=self._inputs)
            return replace(output, tensors=())
        # The last stage: backward begins with the scale of the loss as the gradient of each of its terms.
        scales = [batch.loss_scale for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._grads[key] = lambda: scales
        without_graph: Output = tree_map_only(Tensor, torch.detach, output)
        return without_graph

    def _collected(self, key: Key) -> AbstractContextManager[None]:
        """Context in which weight gradients are left to a pass of their own, if there is one."""
        return self._wgrads[key].collected() if key in self._wgrads else nullcontext()

    def _backward(self, key: Key) -> None:
        stage, number = key
        with self._collected(key):  # a region that runs again must save for this pass what its first run saved
            input_grads = self._calls.pop(key).backward(self._grads.pop(key)())
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
