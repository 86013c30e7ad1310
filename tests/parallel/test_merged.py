"""Merged passes: a forward beside the backward of another micro-batch changes no bit, and hides movements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import moefw
from dispatchers import DISPATCHERS
from fake_steps import fake_assembly
from memory_cases import offload, recompute
from moefw.compose.registry import Registry
from moefw.core.errors import ContractError, MoefwError, PlanError
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Action, Entry, Order, Pair
from moefw.plugins.pipelines.interleaved import Interleaved
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward, ZeroBubble
from moefw.plugins.pipelines.v_shaped import DualPipeV
from moefw.runtime.communication.movement import Flight
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.phases import Phase, PhaseCall
from moefw.runtime.pipeline.link import Direction
from moefw.runtime.pipeline.merging import merged
from moefw.runtime.pipeline.player import Player, Wait
from moefw.runtime.pipeline.timeline import idle_share, most_in_flight, timeline
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.suites.watch import same_bits
from moefw.testing.training import SMALL
from moefw.training import micro_batches
from moefw.training.engine import Engine
from pairwise import deep, quick

SIZES = {"shared_expert_dim": 16, "vocab_size": 64, "num_dense_layers": 1, "mtp_layers": 1, "num_layers": 3}
MICRO_BATCHES = 4
MERGED = {"use": "merged"}
WORLDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {"experts": {"ep": 2}}),
    "4 ranks": (4, {"dense": {"dp": 2, "tp": 2}, "experts": {"ep": 4}}),
    "4 ranks, sharded": (4, {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
    "4 ranks, dense weights gathered and reduced once": (
        4,
        {"dense": {"shard": "all", "zero": 1}, "experts": {"ep": 2, "shard": "all"}},
    ),
}
BUDGET = {"use": "hybridep", "backend": "torch", "rank_capacity": 4.0, "on_overflow": "rerun"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "recompute": {"memory": [recompute("attn_norm", "mlp_norm", "dispatch", "expert_fc1")]},
    "offload": {"memory": [offload("attention", "experts")]},
    "stash": {
        "dispatch": BUDGET,
        "memory": [{"use": "paged-stash", "regions": ["experts"], "page_rows": 8}],
    },
    "nvfp4": {"precision": {"use": "nvfp4", "backend": "emulate"}},
    "gradients in bf16": {"train": {"main_gradients": "bfloat16"}},
    "loop": {"gemm": {"use": "loop"}},
}
QUICK = (
    ("alltoall", "1 rank", "recompute"),
    ("hybridep", "1 rank", "plain"),
    ("alltoall", "1 rank", "nvfp4"),
    ("allgather", "1 rank", "offload"),
    ("deepep", "2 ranks", "gradients in bf16"),
    ("hybridep", "2 ranks", "stash"),
    ("allgather", "4 ranks", "loop"),
    ("deepep", "4 ranks, dense weights gathered and reduced once", "plain"),
)
"""Each dispatcher and way, and each world but one like another, the ways that take long on few ranks."""


def case_of(
    ranks: int, *, train: Mapping[str, Any] | None = None, num_layers: int | None = None, **parts: Any
) -> LayerCase:
    """Whole model with four micro-batches a step, whose size does not depend on the number of ranks."""
    sizes = {**SIZES, "num_layers": num_layers or SIZES["num_layers"]}
    case = whole_model(ranks, parts=parts, plugins=(), micro_batch=1, sizes=sizes)
    settings = {**case.parts["train"], **(train or {})}
    dense = parts.get("parallel", {}).get("dense", {})
    copies = ranks // (dense.get("tp", 1) * parts.get("parallel", {}).get("pp", 1))
    settings["tokens_per_step"] = MICRO_BATCHES * copies * settings["seq_len"]
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": settings}, plugins=())


def stepped(case: LayerCase) -> dict[str, Tensor]:
    """Loss, gradient norm and all gradients of this rank after a step."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine.of(model, optimizer, layout, assembly.spec.train)
    result = engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
    results = {"the loss": torch.tensor(result.loss), "the norm": torch.tensor(result.grad_norm)}
    for piece in canonical_parameters(model):
        if piece.parameter.grad is not None:
            gradient: Any = piece.parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            results[piece.name] = local.clone()
    shared.close()
    return results


def all_stepped(cases: Sequence[LayerCase]) -> list[dict[str, Tensor]]:
    return [stepped(case) for case in cases]


def assert_same_bits(pool: RankPool, ranks: int, plain: LayerCase, *others: LayerCase) -> None:
    for rank, (wanted, *results) in enumerate(pool.run(all_stepped, ranks, (plain, *others))):
        for number, result in enumerate(results):
            assert result.keys() == wanted.keys()
            differing = [name for name in wanted if not same_bits(wanted[name], result[name])]
            assert differing == [], f"rank {rank}, case {number}"


@pytest.mark.parametrize(
    ("dispatcher", "world", "way"),
    [
        pytest.param(*values, marks=() if values in QUICK else pytest.mark.deep)
        for values in product(DISPATCHERS, WORLDS, WAYS)
    ],
)
def test_merged_passes_have_the_bits_of_passes_in_order(pool: RankPool, dispatcher: str, world: str, way: str) -> None:
    """With weight gradients in backward, and with those that wait for a movement."""
    ranks, parallel = WORLDS[world]
    parts = {"dispatch": DISPATCHERS[dispatcher], "parallel": parallel, **WAYS[way]}
    train = {**parts.pop("train", {})}
    plain = case_of(ranks, train=train, **parts)
    merged_case = case_of(ranks, train=train, pipeline=MERGED, **parts)
    delayed = case_of(ranks, train={**train, "delay_wgrads": True}, pipeline=MERGED, **parts)
    assert_same_bits(pool, ranks, plain, merged_case, delayed)


@pytest.mark.parametrize("world", quick(WORLDS, "2 ranks", "4 ranks"))
def test_weight_gradients_may_wait_for_a_movement_without_merging(pool: RankPool, world: str) -> None:
    ranks, parallel = WORLDS[world]
    plain = case_of(ranks, parallel=parallel)
    assert_same_bits(pool, ranks, plain, case_of(ranks, parallel=parallel, train={"delay_wgrads": True}))


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe-v"])
def test_a_merged_pipeline_has_the_bits_of_the_same_schedule_apart(pool: RankPool, schedule: str) -> None:
    parts: Mapping[str, Any] = {"parallel": {"pp": 2, "experts": {"ep": 2}}, "num_layers": 4}
    plain = case_of(4, pipeline={"use": schedule}, **parts)
    pipeline = {"use": schedule, "merged": True}
    merged_case = case_of(4, pipeline=pipeline, **parts)
    delayed = case_of(4, pipeline=pipeline, train={"delay_wgrads": True}, **parts)
    assert_same_bits(pool, 4, plain, merged_case, delayed)


def waits_of_a_step(case: LayerCase) -> list[tuple[str, bool]]:
    """Each wait for what a neighbour sends, with whether it belongs to the pass that waits."""
    model, assembly, layout, shared = open_model(case)
    batches = [replace(batch, loss_scale=torch.tensor(1.0)) for batch in global_batch(assembly, layout, 0)]
    within: list[Action] = []
    waits: list[tuple[str, bool]] = []

    link = model.link
    receive = link.receive

    @contextmanager
    def around(action: Action, partner: Action | None) -> Iterator[None]:
        del partner
        within.append(action)
        yield
        within.pop()

    def receiving(stage: int, direction: Direction, buffers: tuple[Tensor, ...], *, number: int) -> Wait:
        wait = receive(stage, direction, buffers, number=number)
        kind = "F" if direction == "forward" else "B"

        def waiting() -> Sequence[Tensor]:
            inside = [(action.kind, action.stage, action.micro_batch) for action in within] == [(kind, stage, number)]
            waits.append((kind, inside and link.playing is within[0]))
            return wait()

        return waiting

    with mock.patch.object(link, "receive", receiving):
        for _ in Player(model, batches).play(around):
            pass
    shared.close()
    return waits


def test_a_wait_for_a_neighbour_belongs_to_its_pass_in_a_pair_too(pool: RankPool) -> None:
    pipeline = {"use": "interleaved", "merged": True}
    case = case_of(2, parallel={"pp": 2}, num_layers=4, pipeline=pipeline)
    for waits in pool.run(waits_of_a_step, 2, case):
        # Of two stages, forward and backward, but for the forward of the first and the backward of the last of all.
        assert len(waits) == (2 * 2 - 1) * MICRO_BATCHES
        assert all(belongs for _, belongs in waits), waits


# The order of phases.


def moe(layers: int) -> list[Phase]:
    """Phases of MoE layers, without a begin and an end."""
    layer = [
        Phase(str, starts=True),
        Phase(str, finishes=True),
        Phase(str, starts=True),
        Phase(str, finishes=True),
    ]
    return layer * layers


NAMES = ("attend", "receive", "compute", "collect")


def named(order: Sequence[str], forward: int, backward: int) -> list[str]:
    """Names of the phases of an order; ' for backward."""
    ahead = 0
    back = 4 * backward
    names = []
    for kind in order:
        if kind == "F":
            names.append(NAMES[ahead % 4])
            ahead += 1
        else:
            back -= 1
            names.append(f"{NAMES[back % 4]}'")
    assert (ahead, back) == (4 * forward, 0)
    return names


def test_two_layers_run_in_this_order() -> None:
    order = named(merged(moe(2), moe(2)), 2, 2)
    first = ["collect'", "attend", "compute'", "receive'", "receive", "compute", "attend'", "collect'"]
    assert order[:8] == first
    assert order[8:] == ["collect", "attend", "compute'", "receive'", "receive", "compute", "attend'", "collect"]


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (4, 4), (1, 3), (3, 1)])
def test_no_phase_runs_right_behind_the_start_of_what_it_waits_for(forward: int, backward: int) -> None:
    """As far as both have phases left."""
    order = merged(moe(forward), moe(backward))
    shorter = min(forward, backward)
    names = named(order, forward, backward)[: 8 * shorter - 1]
    follows = {"attend": "receive", "compute": "collect", "collect'": "compute'", "receive'": "attend'"}
    assert [pair for pair in pairwise(names) if follows.get(pair[0]) == pair[1]] == []


def test_phases_without_movements_run_too() -> None:
    dense = [Phase(str)] * 3
    assert merged(dense, dense) == ("B",) * 3 + ("F",) * 3
    assert Counter(merged(dense, moe(1))) == {"F": 3, "B": 4}
    assert Counter(merged([*dense, *moe(2)], [*moe(3), *dense])) == {"F": 11, "B": 15}


# What really waits.


class Log:
    """Launches and waits of movements, by phase."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def patched(self) -> Any:
        launch, wait = Flight.__init__, Flight.wait

        def launching(flight: Flight, *arguments: Any) -> None:
            launch(flight, *arguments)
            self.events.append("starts")

        def waiting(flight: Flight) -> list[Tensor]:
            self.events.append("waits")
            return wait(flight)

        return mock.patch.multiple(Flight, __init__=launching, wait=waiting)


def movements(case: LayerCase) -> tuple[list[tuple[bool, bool]], list[list[str]], list[list[str]]]:
    """What phases declare, and what they do forward and backward."""
    model, assembly, layout, shared = open_model(case)
    (batch, *_) = global_batch(assembly, layout, 0)
    log = Log()
    forward: list[list[str]] = []
    backward: list[list[str]] = []
    calls: list[PhaseCall] = []
    value: Any = batch
    with log.patched():
        for phase in model.phases:
            calls.append(PhaseCall())
            log.events = []
            value = calls[-1].run(phase, value)
            forward.append(log.events)
        grads: Any = [torch.tensor(1.0)] * (1 + len(value.losses))
        for call in reversed(calls):
            log.events = []
            grads = call.backward(grads)
            backward.insert(0, log.events)
    declared = [(phase.starts, phase.finishes) for phase in model.phases]
    shared.close()
    return declared, forward, backward


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_phases_declare_what_they_start_and_wait_for(pool: RankPool, dispatcher: str) -> None:
    case = case_of(2, parallel={"experts": {"ep": 2}}, dispatch=DISPATCHERS[dispatcher])
    for declared, forward, backward in pool.run(movements, 2, case):
        for (starts, finishes), ahead, back in zip(declared, forward, backward, strict=True):
            # A dispatcher may have further movements inside of a phase, which start and wait there.
            assert starts == (ahead.count("starts") > ahead.count("waits"))
            assert finishes == (ahead.count("waits") > ahead.count("starts"))
            assert starts == (back.count("waits") > back.count("starts"))
            assert finishes == (back.count("starts") > back.count("waits"))


def stamps(case: LayerCase) -> list[str]:
    """Stamps of progress of this rank's step."""
    with mock.patch.object(micro_batches, "stamp") as stamp:
        stepped(case)
    return [str(call.args[0]) for call in stamp.call_args_list]


def test_a_rank_without_progress_is_told_with_both_micro_batches() -> None:
    said = [event for event in stamps(case_of(1, pipeline=MERGED)) if "beside" in event]
    assert "forward of micro-batch 2 of 4 in stage 0 of 1, beside the backward of micro-batch 1 of 4" in said[0] or (
        "backward of micro-batch 1 of 4 in stage 0 of 1, beside the forward of micro-batch 2 of 4" in said[0]
    )


def fsdp_calls(case: LayerCase) -> Counter[str]:
    """Number of gathers, of those that backward asks for ahead, and of reductions that FSDP runs in a step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    calls: Counter[str] = Counter()
    gather, reduce, prefetch = fsdp.foreach_all_gather, fsdp.foreach_reduce, fsdp.FSDPParamGroup._prefetch_unshard

    def gathers(*arguments: Any, **settings: Any) -> Any:
        calls["gathers"] += 1
        return gather(*arguments, **settings)

    def reduces(*arguments: Any, **settings: Any) -> Any:
        calls["reductions"] += 1
        return reduce(*arguments, **settings)

    def prefetches(target: Any, pass_type: str) -> None:
        calls["prefetches"] += pass_type == "backward"
        prefetch(target, pass_type)

    counted = mock.patch.multiple(fsdp, foreach_all_gather=gathers, foreach_reduce=reduces)
    with counted, mock.patch.object(fsdp.FSDPParamGroup, "_prefetch_unshard", staticmethod(prefetches)):
        stepped(case)
    return calls


def all_fsdp_calls(cases: Sequence[LayerCase]) -> list[Counter[str]]:
    return [fsdp_calls(case) for case in cases]


@pytest.mark.parametrize("zero", [3, *deep(1, 2)])
def test_fsdp_gathers_ahead_and_reduces_as_in_plain_order(pool: RankPool, zero: int) -> None:
    parallel = {side: {**mesh, "zero": zero} for side, mesh in WORLDS["4 ranks, sharded"][1].items()}
    given: Mapping[str, Any] = {"parallel": parallel, "num_layers": 2}
    cases = (
        case_of(4, **given),
        case_of(4, pipeline=MERGED, **given),
        case_of(4, train={"delay_wgrads": True}, pipeline=MERGED, **given),
    )
    layers = given["num_layers"] + SIZES["mtp_layers"]
    later = layers * MICRO_BATCHES if zero > 1 else 0
    """Weights whose gradients are delayed are reduced behind the pass, the others of their layer with its backward."""
    for in_order, merged_calls, delayed in pool.run(all_fsdp_calls, 4, cases):
        for calls in (merged_calls, delayed):
            assert calls["prefetches"] >= 0.9 * in_order["prefetches"]
            assert calls["gathers"] <= in_order["gathers"]
        assert merged_calls["reductions"] == in_order["reductions"]
        assert delayed["reductions"] == in_order["reductions"] + later


# Schedules.


def test_merged_runs_the_first_forward_and_the_last_backward_alone() -> None:
    ((first, *pairs, last),) = Merged().order(1, 4)
    assert (first, last) == (Action("F", 0, 0), Action("B", 0, 3))
    assert pairs == [Pair(Action("F", 0, number + 1), Action("B", 0, number)) for number in range(3)]


@pytest.mark.parametrize("plugin", [Interleaved, DualPipeV], ids=lambda plugin: plugin.name)
def test_a_merged_schedule_runs_the_passes_of_the_same_one_apart(plugin: type[PipelinePlugin]) -> None:
    for ranks, count in ((2, 4), (2, 8), (4, 8), (4, 16)):
        for entries, apart in zip(plugin(merged=True).order(ranks, count), plugin().order(ranks, count), strict=True):
            assert Counter(action for entry in entries for action in entry.passes) == Counter(apart)
            assert any(isinstance(entry, Pair) for entry in entries)


def pairs_behind(schedule: PipelinePlugin, warm_up: Sequence[int], count: int) -> Order:
    """Passes of a schedule of one stage a rank, each forward behind so many beside the backward that is next."""
    order: list[list[Entry]] = []
    for entries, ahead in zip(schedule.order(len(warm_up), count), warm_up, strict=True):
        forwards = [entry for entry in entries if isinstance(entry, Action) and entry.kind == "F"]
        later = iter(forwards[ahead:])
        paired: list[Entry] = [*forwards[:ahead]]
        for entry in entries:
            if not isinstance(entry, Action) or entry.kind == "F":
                continue
            forward = None if entry.kind == "W" else next(later, None)
            paired.append(entry if forward is None else Pair(forward, entry))
        order.append(paired)
    return order


@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), ZeroBubble()], ids=lambda schedule: schedule.name)
def test_a_schedule_that_refuses_to_merge_says_what_it_would_cost(schedule: PipelinePlugin) -> None:
    ranks, count = 8, 64

    def idle(order: Order) -> int:
        """Percent of the time in which the first rank idles."""
        return round(100 * idle_share(timeline(order, lambda action: 2 if action.kind == "B" else 1))[0])

    one_more = pairs_behind(schedule, [ranks - rank for rank in range(ranks)], count)
    enough = pairs_behind(schedule, [2 * (ranks - rank) - 1 for rank in range(ranks)], count)
    apart = schedule.order(ranks, count)
    assert idle(enough) == idle(apart)
    cost = (
        f"would idle {idle(one_more)} % of the time in place of {idle(apart)} %, or hold {most_in_flight(enough[0])} "
    )
    assert f"{cost}micro-batches in place of {most_in_flight(apart[0])}." in schedule.left_out["merged"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "zbv"])
def test_other_schedules_refuse_to_merge_with_a_reason(name: str) -> None:
    said = problems(pipeline={"use": name, "merged": True})
    assert f"'merged' is not an option here. {Registry().get('pipeline', name).declaration.left_out['merged']}" in said


def test_a_pair_whose_parts_need_each_other_is_an_error_that_names_both() -> None:
    pair = Pair(Action("F", 0, 0), Action("B", 0, 0))
    with pytest.raises(ContractError, match="runs 0F0 and 0B0 as a pair, and one needs the other"):
        timeline([[pair]], lambda _: 1)


# Refusals.


def problems(**sections: Any) -> str:
    with pytest.raises(MoefwError) as caught:
        fake_assembly({**SMALL, **sections}, sections.pop("world", 1))
    return str(caught.value)


def test_what_cannot_be_merged_is_refused_with_a_reason() -> None:
    train = {**SMALL["train"]}
    one = {**train, "tokens_per_step": train["micro_batch"] * train["seq_len"]}
    assert "there is none in a step of 1" in problems(pipeline=MERGED, train=one)
    said = problems(pipeline=MERGED, memory=[recompute("layer")])
    assert "recompute makes the layer one phase, and the pipeline merged runs the phases of a layer one by one" in said
    said = problems(pipeline={"use": "interleaved", "merged": True})
    assert "without pp there is one stage" in said
    assert "train.delay_wgrads runs the phases" in problems(
        train={**train, "delay_wgrads": True}, memory=[recompute("layer")]
    )


def test_several_stages_and_schedules_with_passes_of_weight_gradients_are_refused() -> None:
    tree = {**SMALL, "model": {**SMALL["model"], "num_layers": 4}, "parallel": {"pp": 2}}
    with pytest.raises(PlanError, match="merged is a schedule of one stage, and pp is 2"):
        fake_assembly({**tree, "pipeline": MERGED}, 2)
    delayed = {**tree, "pipeline": {"use": "zero-bubble"}, "train": {**SMALL["train"], "delay_wgrads": True}}
    with pytest.raises(PlanError, match="zero-bubble computes weight gradients in passes of their own"):
        fake_assembly(delayed, 2)
    assert moefw.Pair is Pair
    assert idle_share(timeline(Merged().order(1, 4), lambda _: 1)) == [0]
