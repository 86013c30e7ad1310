"""Graphs of a GPU, against a fake of PyTorch's with the real signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch

from moefw.runtime.graphs import CudaGraphs

REAL_GRAPH = torch.cuda.graph


class FakeGraph:
    """In the place of ``torch.cuda.CUDAGraph``: it runs again what a test gives it."""

    def __init__(self) -> None:
        self.given_pool: Any = None

    def pool(self) -> tuple[int, int]:
        return (0, 7)


class FakeCapture:
    """In the place of ``torch.cuda.graph``, whose signature each call must fit."""

    modes: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(REAL_GRAPH.__init__).bind(self, *args, **kwargs)
        given.arguments["cuda_graph"].given_pool = given.arguments.get("pool")
        type(self).modes.append(given.arguments["capture_error_mode"])

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # as PyTorch's, whose end of a capture then fails, too
            raise RuntimeError("operation failed due to a previous error during capture")


class FakeNumbers:
    """A generator that notes what its state is set to."""

    def __init__(self) -> None:
        self.set: list[str] = []

    def clone_state(self) -> str:
        return "before"

    def graphsafe_set_state(self, state: str) -> None:
        self.set.append(state)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> FakeNumbers:
    FakeCapture.modes = []
    found = FakeNumbers()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)
    monkeypatch.setattr(torch.cuda, "default_generators", (found,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def test_graphs_share_a_pool_and_leave_other_threads_alone(numbers: FakeNumbers) -> None:
    graphs = CudaGraphs()
    found: list[Any] = [graphs.capture(lambda: "sums") for _ in range(2)]
    assert [result for _, result in found] == ["sums", "sums"]
    assert [graph.given_pool for graph, _ in found] == [None, (0, 7)]
    assert FakeCapture.modes == ["thread_local"] * 2
    assert numbers.set == []


def test_a_failed_capture_leaves_random_numbers_as_they_were(numbers: FakeNumbers) -> None:
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs().capture(_raising(RuntimeError("this operation is not permitted")))
    assert numbers.set == ["before"]


def test_a_real_generator_has_these_methods() -> None:
    assert callable(torch.Generator.clone_state)
    assert callable(torch.Generator.graphsafe_set_state)


def _raising(error: Exception) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function
