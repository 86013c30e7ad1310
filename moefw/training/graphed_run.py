"""The micro-batches of a step as one graph of the device: captured once, then replayed on the batches of each step."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from moefw.core.errors import RunError
from moefw.core.records import Action
from moefw.core.stages import Batch
from moefw.runtime.graphs import Graph, Graphs
from moefw.system.stamps import stamp
from moefw.training.clock import Clock
from moefw.training.micro_batches import Run
from moefw.training.step_sums import Tally

WARM_UP: Final = 3
"""Steps of a shape that run eagerly first: they tune kernels, and open communicators."""
MOST_SHAPES: Final = 2
"""The most shapes that are captured. Others run eagerly."""
SECTION: Final = "graph"
"""The section of a clock in which a replay counts."""
OnFailure = Literal["stop", "eager"]
"""Reaction to a step that cannot be captured: end the run, or go on without graphs."""


@frozen(eq=False)
class _Captured:
    """A graph, the batches that it reads, the sums that it makes, and the gradients that it leaves."""

    graph: Graph
    batches: Sequence[Batch]
    tally: Tally
    gradients: Sequence[tuple[nn.Parameter, Tensor]]


@final
class GraphedRun:
    """A run whose steps of a known shape are replayed. Parameters have no gradients when it is called.

    Steps of a shape run eagerly at first, and always where rows are to be taken without a budget (``dropless``) or more
    shapes than two come. ``tell`` gets a line about the first such shape, and about a failed capture. Raises RunError
    at the latter if ``on_failure`` is ``stop``.
    """

    def __init__(
        self,
        run: Run,
        parameters: Iterable[nn.Parameter],
        graphs: Graphs,
        *,
        tell: Callable[[str], None],
        on_failure: OnFailure = "stop",
    ) -> None:
        self._run = run
        self._parameters = [*parameters]
        self._graphs = graphs
        self._tell = tell
        self._on_failure = on_failure
        self._failed = False
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        self._has_told_of_shapes = False

    def __call__(self, batches: Sequence[Batch], clock: Clock) -> Tally:
        """Accumulate the gradients of all batches, and return the sums of this rank."""
        shape = _shape(batches)
        if not self._is_due(shape, batches):
            return self._run(batches, clock)
        with clock(SECTION):
            if shape not in self._captured:
                captured = self._capture(batches)
                if captured is None:
                    return self._run(batches, _untimed)
                self._captured[shape] = captured
            replay = f"replay of a graph of {len(batches)} micro-batches"
            stamp(replay)
            tally = self._replay(self._captured[shape], batches)
            tally.replay = replay
            return tally

    def _is_due(self, shape: Hashable, batches: Sequence[Batch]) -> bool:
        """Whether a step of this shape is replayed."""
        if shape in self._captured:
            return True
        if self._failed or any(batch.dropless for batch in batches):
            return False
        self._seen[shape] += 1
        if self._seen[shape] <= WARM_UP:
            return False
        if len(self._captured) < MOST_SHAPES:
            return True
        if not self._has_told_of_shapes:
            self._has_told_of_shapes = True
            self._tell(
                f"steps have more than {MOST_SHAPES} shapes of micro-batches: those of the others run without a graph"
            )
        return False

    def _capture(self, batches: Sequence[Batch]) -> _Captured | None:
        """Capture a step of batches like these. None: it cannot be, and the run goes on without graphs."""
        stamp(f"capture of a graph of {len(batches)} micro-batches")
        own = [tree_map_only(Tensor, torch.clone, batch) for batch in batches]
        try:
            graph, tally = self._graphs.capture(lambda: self._run(own, _untimed))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            what = f"a step cannot be captured as a graph: {_cause(error)}"
            if self._on_failure == "stop":
                fix = "Use train.graphs: none, or train.on_failed_capture: eager to go on without graphs."
                raise RunError(f"{what}.", fix) from error
            self._failed = True
            self._tell(f"{what}; the run goes on without graphs")
            self._drop_gradients()
            return None
        gradients = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._drop_gradients()
        return _Captured(graph=graph, batches=own, tally=tally, gradients=gradients)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _replay(self, captured: _Captured, batches: Sequence[Batch]) -> Tally:
        """Replay a graph on new batches. What it returns is a copy: the next replay writes over its memory."""
        for own, new in zip(captured.batches, batches, strict=True):
            pairs = zip(tree_leaves(own), tree_leaves(new), strict=True)
            for place, value in ((place, value) for place, value in pairs if isinstance(place, Tensor)):
                place.copy_(value)
        captured.graph.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        return captured.tally.copied()


def _shape(batches: Sequence[Batch]) -> Hashable:
    """All that a graph is bound to: of each value of each batch the shape and dtype, or the value itself."""
    leaves, structure = tree_flatten([*batches])
    return (str(structure), *(_shape_of(leaf) for leaf in leaves))


def _shape_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return repr(value)


def _cause(error: RuntimeError) -> str:
    """The first line of an error, and the place in our code, or a plugin's, that it comes from.

    Of several errors, each while the one before it was handled: those of the first. The others say that it happened.
    """
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    torch_folder = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if torch_folder not in frame.filename]
    first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if not frames:
        return first
    at = frames[-1]
    return f"{first}, at {Path(at.filename).name}:{at.lineno}, in {at.name}: {at.line}"


def _untimed(section: str, *passes: Action) -> AbstractContextManager[None]:
    """Clock of a capture, in which nothing is computed."""
    return nullcontext()
