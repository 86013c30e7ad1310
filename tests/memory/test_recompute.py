"""Recompute: no bit changes, a region's results are dropped with its saved tensors, and nothing runs needlessly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchers import DISPATCHERS
from memory_cases import PRECISIONS, Allocations, assert_same, model_case, offload, recompute, run
from moefw.core.contracts import MemoryPolicy
from moefw.core.errors import ContractError, PlanError
from moefw.plugins.memory.recompute.policy import RecomputePolicy
from moefw.runtime.compute.casts import BF16Recipe
from moefw.runtime.compute.product import linear
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.forward_context import forward_with
from moefw.runtime.layer import MoELayer
from moefw.runtime.memory import dropped
from moefw.runtime.phases import Phase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model
from pairwise import each_value

FINE = ("attn_norm", "qkv", "core_attn", "attn_proj", "mlp_norm", "router", "dispatch", "expert_fc1")
EXPERTS = ("expert_fc1", "moe_act")


@pytest.mark.parametrize(
    ("treated", "dispatch", "precision", "in_flight"),
    each_value(
        [("grouped", FINE), ("loop", EXPERTS), ("grouped", ("dispatch",)), ("loop", ("moe_act",))],
        DISPATCHERS,
        PRECISIONS,
        (False, True),
    ),
)
def test_no_bit_changes_in_any_region(
    pool: RankPool, treated: tuple[str, tuple[str, ...]], dispatch: str, precision: str, in_flight: bool
) -> None:
    gemm, regions = treated
    parts = {"gemm": {"use": gemm}, "dispatch": DISPATCHERS[dispatch], "precision": PRECISIONS[precision]}
    plain = run(pool, [], in_flight=in_flight, **parts)
    assert_same(plain, run(pool, [recompute(*regions)], in_flight=in_flight, **parts))


NESTED = {
    "norms, and attention offloaded": [recompute("attn_norm", "mlp_norm"), offload("attention")],
    "queries in an offloaded attention": [offload("attention"), recompute("qkv")],
    "the rows, and the experts recomputed": [recompute("dispatch", "experts")],
    "the rows, and the experts offloaded": [recompute("dispatch"), offload("experts")],
    "every region in a layer": [recompute("layer", *FINE, "shared_experts", "dense_mlp")],
    "two policies with outputs": [recompute("attn_norm"), recompute("mlp_norm", "dispatch")],
}


@pytest.mark.parametrize(
    ("name", "precision", "in_flight"), each_value(NESTED, ("bf16", "fp8-blockwise"), (False, True))
)
def test_no_bit_changes_where_policies_meet(pool: RankPool, name: str, precision: str, in_flight: bool) -> None:
    parts = {"precision": PRECISIONS[precision], "dispatch": DISPATCHERS["alltoall"]}
    plain = run(pool, [], in_flight=in_flight, **parts)
    assert_same(plain, run(pool, NESTED[name], in_flight=in_flight, **parts))


class Norm(nn.Module):
    """Saves its input, and returns a tensor that a GEMM saves; counts its runs and remembers its last result's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.memory = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        self.memory = StorageWeakRef(out.untyped_storage())
        return out


def drops(layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a layer of one phase."""
    (phase,) = dropped.drops((Phase(layer),))
    return phase


def under_the_policy(function: Callable[..., Any]) -> Callable[..., Any]:
    return RecomputePolicy().wrap("attn_norm", function)


def test_what_a_region_returns_is_gone_between_forward_and_backward() -> None:
    norm, weight = Norm(), torch.randn(8, 8, requires_grad=True)
    region = under_the_policy(norm)
    x = torch.randn(4, 8, requires_grad=True)
    out = drops(lambda x: region(x) @ weight)(x)
    assert norm.memory.expired()
    out.sum().backward()
    assert norm.runs == 2
    assert norm.memory.expired()
    again = x.detach().clone().requires_grad_()
    (Norm()(again) @ weight.detach()).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_what_is_not_around_a_layer_keeps_what_it_saves() -> None:
    norm, weight = Norm(), torch.randn(8, 8, requires_grad=True)
    out = under_the_policy(norm)(torch.randn(4, 8, requires_grad=True)) @ weight
    assert not norm.memory.expired()
    out.sum().backward()


def test_a_region_runs_once_more_for_all_who_saved_its_result() -> None:
    norm, weights = Norm(), [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    region = under_the_policy(norm)

    def layer(x: Tensor) -> Tensor:
        normed = region(x)
        return sum(normed.view(-1, 8) @ weight for weight in weights) + normed.T.sin().T

    drops(layer)(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert norm.runs == 2


def test_a_region_whose_result_nobody_saves_runs_no_further_than_its_last_saved_tensor() -> None:
    ran: list[str] = []

    def function(x: Tensor) -> Tensor:
        hidden = x.sin().exp()
        ran.append("saved")
        out = hidden * 2
        ran.append("returned")
        return out

    drops(lambda x: under_the_policy(function)(x) + 1)(torch.randn(4, requires_grad=True)).sum().backward()
    assert ran == ["saved", "returned"]


def test_what_a_region_returns_cannot_be_changed_unseen() -> None:
    out = under_the_policy(lambda x: x * 2)(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified inplace"):
        out.add_(1)


def test_views_of_a_result_come_back_as_views() -> None:
    weight = torch.randn(2, 3, requires_grad=True)
    region = under_the_policy(lambda x: (x.sin(), x.cos().chunk(2, 1)[1]))

    def layer(x: Tensor) -> Tensor:
        one, other = region(x)
        return (one[1:, ::2].T @ weight).sum() + (other * other).sum()

    x = torch.randn(3, 4, requires_grad=True)
    drops(layer)(x).backward()
    plain = x.detach().clone().requires_grad_()
    ((plain.sin()[1:, ::2].T @ weight.detach()).sum() + plain.cos().chunk(2, 1)[1].square().sum()).backward()
    assert torch.allclose(x.grad, plain.grad)


def test_a_graph_may_be_gone_through_twice() -> None:
    norm, x = Norm(), torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    region = under_the_policy(norm)
    out = drops(lambda x: region(x) @ weight)(x).square().sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * once)


def test_a_region_that_saves_something_else_is_an_error() -> None:
    sizes = iter([3, 2])

    def function(x: Tensor) -> Tensor:
        return x[: next(sizes)].sin().sum()

    with pytest.raises(ContractError, match="'attn_norm' saves other tensors when it is run again"):
        under_the_policy(function)(torch.randn(4, requires_grad=True)).backward()


def test_an_error_of_a_region_is_its_own() -> None:
    def function(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        under_the_policy(function)(torch.randn(4, requires_grad=True))


def one_rank(memory: Any, **parts: Any) -> tuple[nn.Module, Callable[[], Tensor], Any]:
    model, assembly, layout, shared = open_model(model_case(1, memory, **parts))
    batch = replace(global_batch(assembly, layout, 0)[0], loss_scale=torch.tensor(1.0))
    return model, lambda: model(batch).loss_sum, shared


@pytest.mark.parametrize("ends", ["by backward", "without backward"])
def test_nothing_is_left_when_a_graph_has_died(ends: str) -> None:
    _, forward, shared = one_rank([recompute(*FINE)])
    with Allocations():
        forward().backward()
    gc.collect()
    gc.disable()
    try:
        with Allocations() as seen:
            loss = forward()
        if ends == "by backward":
            loss.backward()
        del loss
        assert seen.live_bytes() == 0
    finally:
        gc.enable()
    shared.close()


def test_a_layer_does_not_run_again_for_the_one_behind_it() -> None:
    """Each layer's input is kept: the last one's backward needs no other layer."""
    ran: list[int] = []

    def layer(number: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            ran.append(number)
            return x.sin().exp()

        return drops(RecomputePolicy().wrap("layer", forward))

    x = torch.randn(3, requires_grad=True)
    out = layer(1)(hidden := layer(0)(x))
    torch.autograd.grad(out.sum(), hidden, retain_graph=True)
    assert ran == [0, 1, 1]
    out.sum().backward()
    assert sorted(ran) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("regions", "plans", "again"), [(("experts", "router"), 1, 0), (("dispatch",), 1, 1), (("layer",), 2, 0)]
)
def test_rows_travel_again_only_where_the_region_holds_the_dispatch(
    regions: tuple[str, ...], plans: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward, shared = one_rank([recompute(*regions)])
    layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
    calls = {"plan": 0, "redispatch": 0}
    for name in calls:
        monkeypatch.setattr(layers[0].dispatcher, name, counting(calls, name, getattr(layers[0].dispatcher, name)))
    forward().backward()
    assert calls == {"plan": plans * len(layers), "redispatch": again * len(layers)}
    shared.close()


def counting(calls: dict[str, int], name: str, called: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return called(*args, **kwargs)

    return counted


def test_with_quantized_operands_an_input_that_comes_back_is_kept_itself() -> None:
    """Codes of a norm's result would stay alive although the result is dropped, so it is quantized again."""
    saved: dict[str, int] = {}
    for name, memory in (("kept", []), ("dropped", [recompute("attn_norm", "mlp_norm", "dispatch")])):
        _, forward, shared = one_rank(memory, precision={**PRECISIONS["fp8-blockwise"], "saved_activations": "fp8"})
        with Allocations() as seen:
            loss = forward()
        saved[name] = seen.live_bytes()
        loss.backward()
        shared.close()
    assert saved["dropped"] < 0.8 * saved["kept"], saved


def test_a_policy_that_cannot_repeat_a_movement_says_so() -> None:
    class Other(MemoryPolicy):
        def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return function

    with pytest.raises(PlanError, match="'dispatch' is a movement of rows, which Other cannot treat"):
        Other().wrap_movement("dispatch", print, print)


def test_a_region_runs_again_in_the_context_of_its_first_run_whichever_thread_runs_backward() -> None:
    """A GPU's backward has threads of its own, in which no context variable is set."""
    weight = nn.Parameter(torch.randn(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    recipe = BF16Recipe()
    left = Wgrads()
    region = under_the_policy(lambda tokens: linear(tokens, weight, recipe).square())
    with forward_with(wgrads=left):
        out = region(x).sum()
    backward = Thread(target=out.backward)
    backward.start()
    backward.join()
    assert x.grad is not None, "backward failed"
    assert weight.grad is None
    left.run()
    expected = linear(x.detach(), weight, recipe).square().sum()
    torch.testing.assert_close(weight.grad, torch.autograd.grad(expected, weight)[0])
