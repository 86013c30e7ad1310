"""What a trace of a step holds, and that it changes no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import DISPATCHERS
from moefw.core.stages import Batch
from moefw.runtime.communication.movement import Flight
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.phases import Phase
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.tracing.clocks import HostClock
from moefw.tracing.replaced import COLLECTIVES, traced
from moefw.tracing.spans import COMPUTE, TRANSFER, WIRE, Span
from moefw.tracing.tracer import WEIGHT_GRADIENTS, Tracer
from moefw.training.engine import Engine

MICRO_BATCHES = 2
SIZES = {"shared_expert_dim": 16, "vocab_size": 64, "num_dense_layers": 1, "num_layers": 3}
MOE_LAYERS = (1, 2)
PHASES = ("attend", "receive", "compute", "collect")
WORLDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "alone": (1, {}),
    "two ranks": (2, {"parallel": {"experts": {"ep": 2}}}),
    "merged": (2, {"parallel": {"experts": {"ep": 2}}, "pipeline": {"use": "merged"}}),
    "delayed": (2, {"parallel": {"experts": {"ep": 2}}, "train": {"delay_wgrads": True}}),
    "stages": (2, {"parallel": {"pp": 2}}),
    "zero-bubble": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}}),
    "sharded": (2, {"parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}),
    "tensor parallel": (2, {"parallel": {"dense": {"tp": 2}, "experts": {"ep": 2}}}),
    "recomputed layers": (1, {"memory": [{"use": "recompute", "regions": ["layer"]}]}),
}


def case_of(world: str, **more: Any) -> LayerCase:
    ranks, parts = WORLDS[world]
    parts = {**parts, **more}
    train = parts.pop("train", {})
    case = whole_model(ranks, parts=parts, plugins=(), micro_batch=1, sizes=SIZES)
    settings = {**case.parts["train"], **train}
    parallel = parts.get("parallel", {})
    copies = ranks // (parallel.get("pp", 1) * parallel.get("dense", {}).get("tp", 1))
    settings["tokens_per_step"] = MICRO_BATCHES * copies * settings["seq_len"]
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": settings}, plugins=())


def stepped(case: LayerCase, *, is_traced: bool) -> tuple[dict[str, Tensor], list[Span]]:
    """Loss, norm and parameters of this rank after a step, and the spans of its trace."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    batches = global_batch(assembly, layout, 0)
    spans: list[Span] = []
    if is_traced:
        tracer = Tracer(HostClock(), spans.extend)
        is_sharded = hasattr(model, "unshard")
        with traced(tracer, 7, lambda *_: nullcontext(), optimizer=optimizer, is_sharded=is_sharded) as clock:
            result = engine.step(batches, 0.1, clock)
    else:
        result = engine.step(batches, 0.1, lambda *_: nullcontext())
    values = {"loss": torch.tensor(result.loss), "norm": torch.tensor(result.grad_norm)}
    for piece in canonical_parameters(model):
        parameter: Any = piece.parameter.detach()
        values[piece.name] = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).clone()
    shared.close()
    return values, spans


def both(case: LayerCase) -> tuple[list[str], list[Span]]:
    """Names of what differs with and without a trace, and the spans."""
    plain, _ = stepped(case, is_traced=False)
    values, spans = stepped(case, is_traced=True)
    assert plain.keys() == values.keys()
    return [name for name, value in plain.items() if not torch.equal(value, values[name])], spans


Traces = Mapping[str, Sequence[tuple[list[str], list[Span]]]]


@pytest.fixture(scope="module")
def traces(pool: RankPool) -> Traces:
    """What each rank of each world has: see :func:`both`."""
    return {world: pool.run(both, WORLDS[world][0], case_of(world)) for world in WORLDS}


def names(spans: Sequence[Span], kind: str) -> Counter[str]:
    return Counter(span.name for span in spans if span.kind == kind)


@pytest.mark.parametrize("world", WORLDS)
def test_a_trace_changes_no_bit(traces: Traces, world: str) -> None:
    for differing, _ in traces[world]:
        assert differing == []


@pytest.mark.parametrize("world", WORLDS)
def test_spans_of_compute_lie_in_each_other(traces: Traces, world: str) -> None:
    for _, spans in traces[world]:
        entered: list[Span] = []
        for span in sorted(
            (span for span in spans if span.kind in COMPUTE), key=lambda span: (span.begin_ns, -span.end_ns)
        ):
            while entered and entered[-1].end_ns <= span.begin_ns:
                entered.pop()
            if entered:
                assert span.end_ns <= entered[-1].end_ns
                assert COMPUTE.index(span.kind) >= COMPUTE.index(entered[-1].kind)
            else:
                assert span.kind == "step"
            entered.append(span)


@pytest.mark.parametrize("world", WORLDS)
def test_every_micro_batch_passes_every_phase_forward_and_backward(traces: Traces, world: str) -> None:
    by_pass: Counter[tuple[str, int | None, str, int | None]] = Counter()
    for _, spans in traces[world]:
        for span in spans:
            if span.kind == "phase" and span.name in PHASES:
                assert span.passing is not None
                direction = "F" if span.passing == "F" else "B"
                by_pass[direction, span.micro_batch, span.name, span.layer] += 1
    ranks, parts = WORLDS[world]
    copies = ranks // parts.get("parallel", {}).get("pp", 1)

    def times(direction: str, name: str) -> int:
        """A layer is run again up to the last tensor that backward needs, which is before its rows are collected."""
        runs_again = world == "recomputed layers" and direction == "B" and name != "collect"
        return copies * (2 if runs_again else 1)

    wanted = {
        (direction, micro_batch, name, layer): times(direction, name)
        for direction in "FB"
        for micro_batch in range(MICRO_BATCHES)
        for name in PHASES
        for layer in MOE_LAYERS
    }
    assert by_pass == wanted


def test_backward_passes_the_phases_of_forward_in_reverse(traces: Traces) -> None:
    ((_, spans),) = traces["alone"]
    for micro_batch in range(MICRO_BATCHES):
        of_pass = {
            kind: [
                (span.name, span.layer)
                for span in spans
                if span.kind == "phase" and span.passing == kind and span.micro_batch == micro_batch
            ]
            for kind in "FB"
        }
        assert of_pass["F"][:2] == [("transform", 0), ("attend", 1)]
        assert of_pass["B"] == of_pass["F"][::-1]


def test_movements_have_one_name_also_where_a_backward_leaves_weight_gradients(pool: RankPool) -> None:
    parts = {"parallel": {"pp": 2, "experts": {"ep": 2}}, "pipeline": {"use": "zero-bubble"}}
    case = whole_model(4, parts=parts, plugins=(), micro_batch=1, sizes=SIZES)
    for differing, spans in pool.run(both, 4, case):
        assert differing == []
        assert set(names(spans, "movement")) == {"dispatch", "combine"}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_rows_go_to_experts_and_back_forward_and_backward(pool: RankPool, dispatcher: str) -> None:
    case = case_of("two ranks", dispatch=DISPATCHERS[dispatcher])
    for differing, spans in pool.run(both, 2, case):
        assert differing == []
        moved = names(spans, "movement")
        each = 2 * MICRO_BATCHES * len(MOE_LAYERS)
        assert moved["dispatch"] == moved["combine"] == each
        assert names(spans, "wait")["dispatch"] == each
        assert all(span.nbytes for span in spans if span.kind == "movement")


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_number_the_collectives_of_a_group_alike(traces: Traces, world: str) -> None:
    """A movement has the number of its last collective."""
    by_rank = [
        {(span.group, span.number, span.kind, span.name) for span in spans if span.kind in WIRE and span.group}
        for _, spans in traces[world]
    ]
    assert all(each == by_rank[0] for each in by_rank)
    if len(by_rank) > 1:
        assert by_rank[0]


def test_parameters_that_are_gathered_and_gradients_that_are_reduced_are_told_apart(traces: Traces) -> None:
    for _, spans in traces["sharded"]:
        assert names(spans, "gather")["all-gather"] > MICRO_BATCHES * SIZES["num_layers"]
        assert names(spans, "reduction")["reduce-scatter"] > SIZES["num_layers"]
        assert names(spans, "wait")["all-gather"] > 0
    for _, spans in traces["two ranks"]:
        assert names(spans, "gather") == {}
        assert names(spans, "reduction")["all-reduce"] > 0


def test_stages_wait_for_the_tensors_of_each_other(traces: Traces) -> None:
    for _, spans in traces["stages"]:
        assert names(spans, "wait")[TRANSFER] == MICRO_BATCHES


@pytest.mark.parametrize(("world", "passing"), [("delayed", "B"), ("zero-bubble", "W")])
def test_weight_gradients_that_backward_leaves_have_phases_of_their_own(
    traces: Traces, world: str, passing: str
) -> None:
    for _, spans in traces[world]:
        left = [span for span in spans if span.name == WEIGHT_GRADIENTS and span.kind == "phase"]
        assert left
        assert {span.passing for span in left} == {passing}


def test_passes_of_a_pair_name_each_other(traces: Traces) -> None:
    for _, spans in traces["merged"]:
        pairs = {(str(span.action), span.beside) for span in spans if span.kind == "pass" and span.beside}
        assert pairs == {("0F1", "0B0"), ("0B0", "0F1")}


def test_the_optimizer_is_told_in_parts(traces: Traces) -> None:
    for _, spans in traces["two ranks"]:
        assert {"gradients", "sum over ranks", "norms", "results", "optimizer", "update"} <= {*names(spans, "section")}


def failing(case: LayerCase) -> list[Span]:
    """Spans of a step that fails in its second forward."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    first, second = global_batch(assembly, layout, 0)
    broken = Batch(ids_BS=second.ids_BS + 1000, labels_BS=second.labels_BS)
    spans: list[Span] = []
    tracer = Tracer(HostClock(), spans.extend)
    with (
        pytest.raises(IndexError),
        traced(tracer, 1, lambda *_: nullcontext(), optimizer=optimizer, is_sharded=False) as clock,
    ):
        engine.step([first, broken], 0.1, clock)
    shared.close()
    return spans


def test_a_step_that_fails_leaves_what_it_has_done(pool: RankPool) -> None:
    (spans,) = pool.run(failing, 1, case_of("alone"))
    passes = [str(span.action) for span in spans if span.kind == "pass"]
    assert passes == ["0F0", "0B0", "0F1"]
    whole = spans[0]
    assert whole.kind == "step"
    assert all(whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns for span in spans)


def test_no_function_stays_replaced(traces: Traces) -> None:
    before = [Phase.__call__, Flight.__init__, Flight.wait, dist.irecv]
    before += [getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
    both(case_of("alone"))
    after = [Phase.__call__, Flight.__init__, Flight.wait, dist.irecv]
    after += [getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
    assert before == after
    assert all(function.__module__ != "moefw.tracing.replaced" for function in after)
