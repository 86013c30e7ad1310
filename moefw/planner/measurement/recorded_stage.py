"""A stage that runs for a plan, phase by phase, with the moments at which forward and backward reach each phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefw.planner.measurement.layers import RunLayer
from moefw.recording.places import Places
from moefw.recording.recorder import Recorder
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.phases import Function, Phase


@final
class PlacedWgrads(Wgrads):
    """Weight gradients that count in the place whose backward has left them, whenever they are computed."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def leave(self, accumulate: Callable[[], None]) -> None:
        """Leave to :meth:`run` what computes the gradient of one weight and accumulates it."""
        place = self._places.here

        def accumulate_there() -> None:
            with self._places.delayed(place):
                accumulate()

        super().leave(accumulate_there)


@final
class RecordedStage:
    """The phases of a stage that run. Boundary i is before phase i, and the last one behind all of them.

    ``by_phase``: whether each phase has a graph of its own, so that its backward begins with all of its gradients.
    """

    def __init__(self, recorder: Recorder, *, by_phase: bool) -> None:
        self._recorder = recorder
        self._by_phase = by_phase
        self.phases: list[Phase] = []
        self.layers: list[RunLayer | None] = []
        """The layer of each phase; None: the begin and the end of the stage."""
        self.forward: list[int] = [0]
        """The moment at which forward reached each boundary."""
        self.backward: list[int] = [0]
        """The moment at which backward had the gradients of all tensors at each boundary."""

    def add(self, phase: Phase, layer: RunLayer | None = None) -> None:
        """Append a phase, which notes when forward reaches the boundary before it, and backward the one behind it."""
        boundary = len(self.phases)
        self.layers.append(layer)
        self.forward.append(0)
        self.backward.append(0)

        def noting(function: Function) -> Function:
            def run(value: Any) -> Any:
                self.forward[boundary] = self._recorder.now
                outputs = function(value)
                self._note_backward(boundary + 1, outputs)
                return outputs

            return run

        self.phases.append(phase.wrapped(noting))

    def end(self, kind: str, began: int, ended: int) -> None:
        """Note the moments between which a pass of ``kind``, ``F`` or ``B``, ran."""
        if kind == "F":
            self.forward[0] = began
            self.forward[-1] = ended
        else:
            self.backward[-1] = began
            self.backward[0] = ended

    def forward_of(self, phase: int, *, last: int | None = None) -> range:
        """Moments of the forward of a phase, or of those from it to the ``last``."""
        end = (phase if last is None else last) + 1
        return range(self.forward[phase], self.forward[end])

    def backward_of(self, phase: int, *, last: int | None = None) -> range:
        """Moments of the backward of a phase, or of those from it to the ``last``, which is the first to run."""
        end = (phase if last is None else last) + 1
        return range(self.backward[end], self.backward[phase])

    def standing_for_others(self) -> Iterator[tuple[RunLayer, Sequence[int]]]:
        """Yield the layers that stand for others, with the numbers of their phases."""
        for layer, numbers in self._by_layer():
            if layer is not None and layer.more:
                yield layer, numbers

    def whole(self) -> list[tuple[int, int]]:
        """Phases of the stage with all of its layers: the number of the phase that runs for each, and how many layers
        like its own are behind that layer.

        A layer that stands for others counts as the last one of its row.
        """
        phases: list[tuple[int, int]] = []
        for layer, numbers in self._by_layer():
            more = 0 if layer is None else layer.more
            for behind in range(more, -1, -1):
                phases += [(number, behind) for number in numbers]
        return phases

    def _by_layer(self) -> Iterator[tuple[RunLayer | None, Sequence[int]]]:
        """Yield each layer with the numbers of its phases."""
        for layer, numbers in groupby(range(len(self.phases)), key=self.layers.__getitem__):
            yield layer, [*numbers]

    def _note_backward(self, boundary: int, outputs: Any) -> None:
        """Let the gradients of a phase's outputs note when backward has all of them."""

        def reached(grad: Tensor) -> None:
            # In one graph the last gradient that is computed decides. In a graph of its own a phase has all of them
            # when it begins, and the first one that it reads decides.
            if not self._by_phase or self.backward[boundary] == 0:
                self.backward[boundary] = self._recorder.now

        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(reached)
