"""Graphs of a device: what a function launches, recorded once, and run again on the same memory without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final

import torch

T = TypeVar("T")


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Launch it again, on the memory of the recording."""


class Graphs(Protocol):
    """Records graphs."""

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Record what ``function`` launches. Return the graph, and the function's result, which replays fill.

        Raises RuntimeError if the function does what no graph holds.
        """


@final
class CudaGraphs:
    """Graphs of a CUDA GPU, which share one pool of memory: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Record what ``function`` launches; nothing is computed. Raises RuntimeError where it waits for the device."""
        graph = torch.cuda.CUDAGraph()
        numbers = torch.cuda.default_generators[torch.cuda.current_device()]
        before = numbers.clone_state()
        try:
            # Other threads, such as those that read data or write traces, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError:
            # PyTorch leaves the generator as if the capture went on, and refuses to draw from it.
            numbers.graphsafe_set_state(before)
            raise
        self._pool = graph.pool()
        return graph, result
