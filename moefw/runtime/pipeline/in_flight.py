"""A micro-batch in a stage, between the begin of its forward and the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import Tensor

from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.forward_context import forward_with
from moefw.runtime.phases import Phase, PhaseCall


@final
class InFlight:
    """The phases of a micro-batch in a stage, run one by one: each has a graph of its own.

    ``wgrads``: the collection to which products leave their weight gradients; None: backward computes them at once.
    ``fills_movements``: whether these are computed in backward all the same, each behind the next phase that starts a
    movement, while rows travel; otherwise a pass of their own computes them.
    """

    def __init__(self, phases: Sequence[Phase], wgrads: Wgrads | None, *, fills_movements: bool = False) -> None:
        self.phases = phases
        self.wgrads = wgrads
        self._fills_movements = fills_movements
        self._calls: list[PhaseCall] = []
        """The graphs of the phases that have run forward and not yet backward."""
        self._value: Any = None
        """The input of the next phase of forward; behind the last, the output of the stage."""
        self._behind: list[int] = []
        """Numbers of phases whose backward has run, and whose weight gradients may be left."""
        self.finished: list[int] = []
        """Numbers of phases whose gradients are there, weight gradients included. The caller empties it."""
        self._grads: Sequence[Tensor | None] = ()
        """The gradients with which the next phase of backward begins; behind the last, those of the stage's input."""

    @property
    def leaves_wgrads(self) -> bool:
        """Whether a pass of weight gradients follows the backward."""
        return self.wgrads is not None and not self._fills_movements

    def begin_forward(self, value: Any) -> None:
        """Take the input of the stage."""
        self._value = value

    def forward(self) -> None:
        """Run the next phase forward."""
        call = PhaseCall()
        phase = self.phases[len(self._calls)]
        with self._wgrads_left():
            self._value = call.run(phase, self._value)
        self._calls.append(call)

    def end_forward(self) -> Any:
        """Output of the stage."""
        output = self._value
        self._value = None
        return output

    def begin_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the stage's output."""
        self._grads = grads

    def backward(self) -> None:
        """Run the backward of the last phase that is left."""
        self._grads = self._calls.pop().backward(self._grads)
        number = len(self._calls)
        self._behind.append(number)
        if self.wgrads is None or (self._fills_movements and self.phases[number].finishes):
            self.run_wgrads()

    def end_backward(self) -> Sequence[Tensor | None]:
        """Gradients of the stage's input."""
        grads = self._grads
        self._grads = ()
        return grads

    def run_wgrads(self) -> None:
        """Compute the weight gradients that backward has left, if there are any."""
        if self.wgrads is not None:
            self.wgrads.run()
        self.finished += self._behind
        self._behind.clear()

    def _wgrads_left(self) -> AbstractContextManager[None]:
        return nullcontext() if self.wgrads is None else forward_with(wgrads=self.wgrads)
