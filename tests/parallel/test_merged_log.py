"""The log of a merged step: what lies between the launch of a movement and its wait, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.tracing.tracer import WEIGHT_GRADIENTS
from moefw.training.engine import Engine
from step_log import Event, StepLog, in_order

MICRO_BATCHES = 4
SIZES = {"shared_expert_dim": 16, "vocab_size": 64, "num_dense_layers": 1, "num_layers": 3}
MOE_LAYERS = 2
MOVEMENTS = 4 * MOE_LAYERS
"""Movements of a micro-batch: a dispatch and a combine a layer, and the duals of both in backward."""


def case_of(*, train: Mapping[str, Any] | None = None, **parts: Any) -> LayerCase:
    """Whole model on two ranks that share experts, with four micro-batches a step."""
    parts = {"parallel": {"experts": {"ep": 2}}, **parts}
    case = whole_model(2, parts=parts, plugins=(), micro_batch=1, sizes=SIZES)
    settings = {**case.parts["train"], **(train or {})}
    settings["tokens_per_step"] = MICRO_BATCHES * 2 * settings["seq_len"]
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": settings}, plugins=())


def logged(case: LayerCase) -> list[Event]:
    """Log of this rank's step."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    log = StepLog(layout.group("ep", "etp"))
    with log.logging(lambda *_: nullcontext(), optimizer) as clock:
        engine.step(global_batch(assembly, layout, 0), 0.0, clock)
    shared.close()
    return log.events


def under_way(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Yield the events from the launch of each movement to its first wait, both included."""
    launches: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.kind == "launch":
            launches[event.movement] = at
        elif event.kind == "wait" and event.movement in launches:
            yield events[launches.pop(event.movement) : at + 1]
    assert not launches, "every movement is waited for"


def phases_of_others(between: Sequence[Event]) -> set[str]:
    """Phases of other micro-batches that compute between a launch and its wait."""
    own = between[0].action
    return {event.phase for event in between if event.kind == "compute" and event.phase and event.action != own}


Logs = Mapping[str, Sequence[Sequence[Event]]]
"""Logs of both ranks, by case."""
MERGED = {"pipeline": {"use": "merged"}}
DELAYED = {"train": {"delay_wgrads": True}}
CASES: Mapping[str, LayerCase] = {
    "in order, delayed": case_of(**DELAYED),
    "merged": case_of(**MERGED),
    "merged, delayed": case_of(**MERGED, **DELAYED),
}


@pytest.fixture(scope="module")
def logs(pool: RankPool) -> Logs:
    return {name: pool.run(logged, 2, case) for name, case in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_log_one_order(logs: Logs, case: str) -> None:
    first, second = logs[case]
    assert in_order(first) == in_order(second)


@pytest.mark.parametrize("case", ["merged", "merged, delayed"])
def test_another_micro_batch_computes_between_launch_and_wait_of_every_movement_of_a_pair(
    logs: Logs, case: str
) -> None:
    for events in logs[case]:
        in_pairs = [between for between in under_way(events) if between[0].beside is not None]
        assert len(in_pairs) == (MICRO_BATCHES - 1) * MOVEMENTS
        exposed = [between[0] for between in in_pairs if not phases_of_others(between)]
        assert exposed == []


def test_the_first_forward_and_the_last_backward_run_alone(logs: Logs) -> None:
    for events in logs["merged"]:
        alone = [between for between in under_way(events) if between[0].beside is None]
        assert {str(between[0].action) for between in alone} == {"0F0", f"0B{MICRO_BATCHES - 1}"}
        assert len(alone) == MOVEMENTS


def test_in_order_nothing_of_another_micro_batch_runs_while_rows_travel(logs: Logs) -> None:
    for events in logs["in order, delayed"]:
        assert {phase for between in under_way(events) for phase in phases_of_others(between)} == set()


@pytest.mark.parametrize("case", ["in order, delayed", "merged, delayed"])
def test_delayed_weight_gradients_are_computed_while_rows_of_their_backward_travel(logs: Logs, case: str) -> None:
    for events in logs[case]:
        of_backward = [between for between in under_way(events) if between[0].phase in ("receive'", "collect'")]
        assert len(of_backward) == MICRO_BATCHES * MOVEMENTS // 2
        for between in of_backward:
            own_phases = {event.phase for event in between if event.action == between[0].action}
            assert WEIGHT_GRADIENTS in own_phases


@pytest.mark.parametrize(("case", "queue"), [("in order, delayed", True), ("merged", False)])
def test_reads_of_counts_queue_behind_rows_only_where_passes_run_apart(logs: Logs, case: str, queue: bool) -> None:
    """In a merged step, rows of another micro-batch are under way when the host reads counts."""
    for events in logs[case]:
        reads = [event for event in events if event.kind == "read"]
        assert len(reads) == MICRO_BATCHES * MOE_LAYERS
        assert {event.on_wire_of_rows for event in reads} == {queue}
