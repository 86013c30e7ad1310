"""A replay that never ends is named by the watch, with a time-out that begins when the host waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, final

import pytest
import torch

from moefw.system.stamps import stamp, stamping
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.training.clock import StepClock
from moefw.training.engine import Engine
from moefw.training.faults.blame import Seen, accusation, culprit
from moefw.training.faults.record import RECORD_BYTES, read_record
from moefw.training.faults.stamps import RankStamps
from moefw.training.graphed_run import WARM_UP
from moefw_kernels.devices import HostCopy

T = TypeVar("T")
TIMEOUT_S = 6.0


class StillWaitingError(Exception):
    """The host waits for a device that does not answer."""


@final
class Endless:
    """Graphs and a graph whose replay is launched at once and never ends: then no copy to the host arrives."""

    def __init__(self) -> None:
        self.hangs = False

    def capture(self, function: Callable[[], T]) -> tuple[Endless, T]:
        return self, function()

    def replay(self) -> None:
        self.hangs = True


BUDGET = {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun", "max_tokens": 64}


@pytest.mark.parametrize("dispatch", [{"use": "alltoall"}, BUDGET], ids=["no budget", "a budget is read first"])
def test_a_replay_that_never_ends_is_named(monkeypatch: pytest.MonkeyPatch, dispatch: Mapping[str, Any]) -> None:
    graphs = Endless()
    read = HostCopy.read

    def unless_it_hangs(copy: HostCopy) -> Iterator[torch.Tensor]:
        if graphs.hangs:
            raise StillWaitingError
        return read(copy)

    monkeypatch.setattr(HostCopy, "read", unless_it_hangs)
    sizes = {"vocab_size": 64, "num_layers": 1, "num_dense_layers": 0}
    case = whole_model(1, parts={"dispatch": dispatch}, plugins=(), micro_batch=1, sizes=sizes)
    model, assembly, layout, shared = open_model(case)
    engine = Engine(model, torch.optim.SGD(model.parameters()), layout, clip_norm=1.0, graphs=graphs)
    clock = StepClock()
    buffer = memoryview(bytearray(RECORD_BYTES))
    counts = []

    def steps() -> None:
        for step in range(WARM_UP + 1):
            stamp("data", step=step + 1)
            counts.append(read_record(buffer).stamps)
            engine.step(global_batch(assembly, layout, step)[:2], 0.1, clock)

    with stamping(RankStamps(buffer, wake=lambda: None)), pytest.raises(StillWaitingError):
        steps()
    shared.close()
    hanging = Seen(rank=0, record=read_record(buffer), still_s=TIMEOUT_S + 1)
    assert hanging.record.stamps > counts[-1] + 3, "the wait has a stamp, and with it a time-out, of its own"
    assert culprit([hanging], TIMEOUT_S) is hanging
    what = accusation(hanging, [hanging], TIMEOUT_S).what
    assert f"(run.timeout_s allows 6): step {WARM_UP + 1}, results of the replay of a graph of 2 micro-batches." in what
