"""A bad step of a run with graphs is searched for its first bad value in an eager run, in which hooks run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar, final

import pytest
import torch

from moefw.core.errors import RunError
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training.engine import Engine
from moefw.training.graphed_run import WARM_UP

T = TypeVar("T")


@final
class CountedReplays:
    """Graphs and a graph that counts its replays; what the capture computed is their result."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, function: Callable[[], T]) -> tuple[CountedReplays, T]:
        return self, function()

    def replay(self) -> None:
        self.replays += 1


def test_a_bad_step_is_watched_without_a_graph() -> None:
    graphs = CountedReplays()
    sizes = {"vocab_size": 64, "num_layers": 2, "num_dense_layers": 1}
    model, assembly, layout, shared = open_model(whole_model(1, parts={}, plugins=(), micro_batch=1, sizes=sizes))
    engine = Engine(model, torch.optim.SGD(model.parameters()), layout, clip_norm=1.0, graphs=graphs)

    def step(number: int) -> None:
        engine.step(global_batch(assembly, layout, number)[:2], 0.1, lambda *_: nullcontext(), number=number + 1)

    for number in range(WARM_UP):
        step(number)
    model.get_submodule("layers.1.attention_norm").register_forward_hook(lambda *given: given[-1] * torch.nan)
    with pytest.raises(RunError) as caught:
        step(WARM_UP)
    shared.close()
    assert graphs.replays == 1
    assert "the output of layers.1.attention_norm, in forward of micro-batch 1 of 2, holds 512 NaN" in str(caught.value)
