"""A scheduler may cut a model at its phases, and run them back in another order: no bit changes, and no byte is held."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dispatchers import DISPATCHERS
from memory_cases import Allocations, offload, recompute
from moefw.core.stages import tensor_dataclass
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.forward_context import forward_with
from moefw.runtime.phases import PhaseCall, differentiable
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.suites.watch import same_bits
from pairwise import each_value, quick
from phase_cases import (
    MicroBatch,
    all_forward_first,
    in_one,
    interleaved,
    phase_by_phase,
    scheduled,
    trained,
    wgrads_after_each,
    wgrads_at_the_end,
)

SCHEDULES = (in_one, phase_by_phase, interleaved, all_forward_first)

WORLDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {"experts": {"ep": 2}}),
    "4 ranks": (4, {"dense": {"dp": 2, "tp": 2}, "experts": {"ep": 4}}),
    "4 ranks, sharded": (4, {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
}
SIZES = {"shared_expert_dim": 16, "vocab_size": 64, "num_layers": 2}
POLICIES: Mapping[str, list[dict[str, Any]]] = {
    "nothing": [],
    "recompute": [recompute("attn_norm", "mlp_norm", "dispatch", "expert_fc1")],
    "recompute of layers": [recompute("layer")],
    "offload": [offload("attention", "experts")],
    "both": [recompute("mlp_norm", "router"), offload("qkv", "expert_fc1")],
}


@pytest.mark.parametrize(("dispatcher", "world", "policy"), each_value(DISPATCHERS, WORLDS, POLICIES))
def test_no_bit_depends_on_the_order_in_which_phases_run(
    pool: RankPool, dispatcher: str, world: str, policy: str
) -> None:
    ranks, parallel = WORLDS[world]
    parts = {"dispatch": DISPATCHERS[dispatcher], "parallel": parallel, "memory": POLICIES[policy]}
    case = whole_model(ranks, parts=parts, plugins=(), sizes=SIZES)
    for rank, (plain, *others) in enumerate(pool.run(scheduled, ranks, case, SCHEDULES)):
        for schedule, found in zip(SCHEDULES[1:], others, strict=True):
            assert found.keys() == plain.keys()
            wrong = [name for name in plain if not same_bits(plain[name], found[name])]
            assert not wrong, (schedule.__name__, rank)


@pytest.mark.parametrize("world", quick(WORLDS, "4 ranks, sharded"))
def test_nor_with_losses_of_tokens_further_ahead(pool: RankPool, world: str) -> None:
    ranks, parallel = WORLDS[world]
    case = whole_model(ranks, parts={"parallel": parallel}, plugins=(), sizes={**SIZES, "mtp_layers": 2})
    for plain, *others in pool.run(scheduled, ranks, case, SCHEDULES):
        for found in others:
            assert [name for name in plain if not same_bits(plain[name], found[name])] == []


@pytest.mark.parametrize("policy", quick(POLICIES, "recompute of layers", "both"))
def test_nor_with_a_loss_over_all_layers_which_no_recompute_doubles(pool: RankPool, policy: str) -> None:
    routing = {"use": "topk", "balance": [{"kind": "aux_loss", "over": "model", "coeff": 1.0}]}
    ranks, parallel = 2, {"dense": {"tp": 2}, "experts": {"ep": 2}}
    cases = [
        whole_model(ranks, parts={"parallel": parallel, **parts}, plugins=(), sizes={**SIZES, "num_layers": 3})
        for parts in ({}, {"routing": routing}, {"routing": routing, "memory": POLICIES[policy]})
    ]
    without, plain, *_ = (pool.run(scheduled, ranks, case, (in_one,)) for case in cases[:2])
    for rank, schedules in enumerate(pool.run(scheduled, ranks, cases[2], SCHEDULES)):
        for found in schedules:
            assert [name for name in found if not same_bits(plain[rank][0][name], found[name])] == []
    router = "layers.1.moe.router.weight"
    assert not torch.allclose(without[0][0][router], plain[0][0][router])


SPLIT: Mapping[str, Mapping[str, Any]] = {
    "grouped, fp32": {"gemm": {"use": "grouped"}, "precision": {"use": "fp32"}},
    "grouped, bf16": {"gemm": {"use": "grouped"}, "precision": {"use": "bf16"}},
    "loop, fp32": {"gemm": {"use": "loop"}, "precision": {"use": "fp32"}},
    "loop, bf16": {"gemm": {"use": "loop"}, "precision": {"use": "bf16"}},
    "grouped, nvfp4": {"gemm": {"use": "grouped"}, "precision": {"use": "nvfp4", "backend": "emulate"}},
    "loop, fp8": {"gemm": {"use": "loop"}, "precision": {"use": "fp8-blockwise", "backend": "emulate"}},
}


@pytest.mark.parametrize(("parts", "policy"), each_value(SPLIT, ["nothing", "both"]))
def test_all_weight_gradients_may_be_computed_at_the_very_end(pool: RankPool, parts: str, policy: str) -> None:
    given = {**SPLIT[parts], "parallel": {"experts": {"ep": 2}}, "memory": POLICIES[policy]}
    case = whole_model(2, parts=given, plugins=(), sizes=SIZES)
    for plain, later in pool.run(scheduled, 2, case, (in_one, wgrads_at_the_end)):
        assert plain.keys() == later.keys()
        assert [name for name in plain if not same_bits(plain[name], later[name])] == []


def test_fsdp_reduces_weight_gradients_that_come_later(pool: RankPool) -> None:
    parallel = {"dense": {"shard": "all"}, "experts": {"shard": "all"}}
    case = whole_model(2, parts={"parallel": parallel}, plugins=(), sizes=SIZES)
    for plain, later in pool.run(scheduled, 2, case, (in_one, wgrads_after_each)):
        assert plain.keys() == later.keys()
        assert [name for name in plain if not same_bits(plain[name], later[name])] == []


def test_a_schedule_takes_the_place_of_the_engines_loop(pool: RankPool) -> None:
    """Loss scale, gradient norm, clipping, router updates and statistics are those of the engine, bit for bit."""
    routing = {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "aux_loss"}]}
    case = whole_model(2, parts={"parallel": {"experts": {"ep": 2}}, "routing": routing}, plugins=(), sizes=SIZES)
    assert pool.run(trained, 2, case, interleaved) == pool.run(trained, 2, case, None)


def test_keys_of_rows_cross_a_cut(pool: RankPool) -> None:
    """A recipe that rounds at random draws the same, however the phases are run."""
    parts = {"precision": {"use": "nvfp4", "backend": "emulate"}, "parallel": {"experts": {"ep": 2}}}
    case = whole_model(2, parts=parts, plugins=(), sizes=SIZES)
    for plain, other in pool.run(scheduled, 2, case, (in_one, interleaved)):
        assert [name for name in plain if not same_bits(plain[name], other[name])] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_scheduler_holds_what_autograd_saves_and_no_byte_more(policy: str) -> None:
    """Neither inputs nor outputs of a phase stay because the graph is cut there; the offloaded are on the host."""
    case = whole_model(1, parts={"memory": POLICIES[policy]}, plugins=(), sizes=SIZES)
    model, assembly, layout, shared = open_model(case)
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    for _ in range(2):  # pools of policies are there after the first
        with Allocations() as whole:
            loss = model(batch).loss_sum
        saved = whole.live_bytes()
        loss.backward()
    with Allocations() as in_phases:
        flow = MicroBatch(model, batch)
        for _ in model.phases:
            flow.forward()
    flow.output = flow.output.loss_sum  # without statistics
    assert in_phases.live_bytes() == saved
    for _ in model.phases:
        flow.backward()
    assert in_phases.live_bytes() < saved / 2
    shared.close()


class Named(NamedTuple):
    """What a third party may pass on."""

    first: Any
    second: Any


@tensor_dataclass
class Kept:
    """What parts of a layer pass on, with an optional field."""

    rows: Any
    others: Any = None


def test_gradients_of_a_phase_are_those_of_the_tensors_in_any_pytree() -> None:
    with_gradient = [torch.full((2,), float(number), requires_grad=True) for number in range(1, 5)]
    counts = torch.arange(2)
    unchanged = Kept(rows=counts)
    first, second, third, fourth = with_gradient
    passed = Named({"a": [first, counts], "b": None}, (Kept(rows=second, others=unchanged), third, fourth, "text"))
    seen: list[Any] = []

    def phase(value: Any) -> Any:
        seen.append(value)
        (kept, *others, _) = value.second
        return Kept(rows=value.first["a"][0] * 2 + kept.rows * 3, others=[others[0] * 5, counts])

    call = PhaseCall()
    output = call.run(phase, passed)
    (value,) = seen
    assert (type(value), type(value.second[0])) == (Named, Kept)
    assert value.second[0].others is unchanged
    assert value.first["a"][1] is counts
    assert differentiable(passed) == with_gradient == tree_leaves_with_gradient(passed)
    assert differentiable(output) == [output.rows, output.others[0]]
    grads = call.backward([torch.ones(2), torch.ones(2)])
    assert [None if grad is None else grad.tolist() for grad in grads] == [[2.0] * 2, [3.0] * 2, [5.0] * 2, None]
    assert all(tensor.grad is None for tensor in with_gradient)


def tree_leaves_with_gradient(value: Any) -> list[Any]:
    """The same as PyTorch finds them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def test_a_phase_whose_backward_never_runs_leaves_nothing() -> None:
    model, assembly, layout, shared = open_model(whole_model(1, parts={}, plugins=(), sizes=SIZES))
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    gc.disable()
    try:
        for _ in range(2):  # what torch imports at first use keeps frames alive
            gc.collect()
            with Allocations() as made:
                flow = MicroBatch(model, batch)
                for _ in model.phases[:-2]:
                    flow.forward()
            del flow
        assert made.live_bytes() == 0
    finally:
        gc.enable()
    shared.close()


@pytest.mark.parametrize("gemm", ["grouped", "loop"])
def test_no_gemm_computes_its_weight_gradient_with_those_of_its_inputs(gemm: str) -> None:
    case = whole_model(1, parts={"gemm": {"use": gemm}}, plugins=(), sizes=SIZES)
    model, assembly, layout, shared = open_model(case)
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    later = Wgrads()
    with forward_with(wgrads=later):
        loss = model(batch).loss_sum
    loss.backward()
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    assert [name for name, weight in matrices.items() if weight.grad is not None] == ["embed.weight"]
    later.run()
    assert [name for name, weight in matrices.items() if weight.grad is None] == []
    shared.close()
