"""Sinkhorn balances a skewed batch; the forced router chooses every expert in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import asdict
from test_router_topk import EXPERTS, batch_of, probe, tokens
from torch import Tensor

from moefw.compose.machine import lone_site
from moefw.core.errors import ContractError
from moefw.core.site import Dims, Machine
from moefw.core.stages import Batch, Routing
from moefw.plugins.routers.forced import Forced
from moefw.plugins.routers.forced.router import ForcedRouter
from moefw.plugins.routers.sinkhorn import Sinkhorn
from moefw.plugins.routers.sinkhorn.router import SinkhornRouter, balanced
from moefw.testing.choices import Rule, route

KINDS: dict[str, tuple[type, type]] = {"sinkhorn": (Sinkhorn, SinkhornRouter), "forced": (Forced, ForcedRouter)}


def router(kind: str, top_k: int, *, experts: int = EXPERTS, **options: Any) -> Any:
    dims = Dims(model_dim=16, expert_dim=8, num_experts=experts, top_k=top_k)
    declaration, runtime = KINDS[kind]
    made = runtime(lone_site(dims, Machine()), **asdict(declaration(**options)))
    torch.nn.init.normal_(made.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return made


def assert_equals_formulas(made: Any, rule: Rule, batch: Batch) -> Routing:
    x_TD = tokens(batch.ids_BS.numel()).requires_grad_()
    x, weight = x_TD.detach().double().requires_grad_(), made.weight.detach().double().requires_grad_()
    valid = torch.ones(len(x), dtype=torch.bool) if batch.mask_T is None else batch.mask_T
    wanted = route(x @ weight.T, rule, valid=valid)
    routing = made(x_TD, batch)
    by_k = torch.arange(rule.top_k).double() + probe(routing, rule.top_k)
    (routing.weights_TK * by_k.float()).sum().backward()
    ((wanted.weights_TK * by_k).sum() + wanted.loss).backward()
    assert torch.equal(routing.expert_ids_TK, wanted.ids_TK)
    torch.testing.assert_close(routing.weights_TK.double(), wanted.weights_TK, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(x_TD.grad.double(), x.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)
    counts = torch.bincount(wanted.ids_TK[wanted.ids_TK >= 0], minlength=EXPERTS)
    assert torch.equal(routing.stats["tokens_per_expert"], counts.float())
    losses = sum(loss.item() for loss in routing.aux_losses.values()) / max(1, int(valid.sum()))
    assert losses == pytest.approx(wanted.loss.item(), rel=1e-5, abs=1e-9)
    return routing


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("kind", KINDS)
def test_values_choices_and_gradients_equal_the_formulas(kind: str, top_k: int, masked: bool) -> None:
    assert_equals_formulas(router(kind, top_k), Rule(kind=kind, top_k=top_k), batch_of((3, 7), masked=masked))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_and_masked_tokens_only_route_nowhere(kind: str) -> None:
    for batch in (batch_of((1, 0)), batch_of((1, 6), masked=True)):
        made = router(kind, 2)
        routing = made(tokens(batch.ids_BS.numel()), batch)
        assert (routing.expert_ids_TK == -1).all()
        assert (routing.weights_TK == 0).all()
        assert routing.stats["tokens_per_expert"].sum() == 0
        routing.weights_TK.sum().backward()
        assert made.weight.grad.abs().max() == 0


class TestSinkhorn:
    def test_the_z_loss_is_attached_once(self) -> None:
        rule = Rule(kind="sinkhorn", top_k=2, z_coeff=0.3)
        assert_equals_formulas(router("sinkhorn", 2, z_loss=0.3), rule, batch_of((3, 7), scale=1 / 21))
        assert_equals_formulas(router("sinkhorn", 2, z_loss=0.3), rule, batch_of((3, 7), masked=True, scale=1 / 10))

    @pytest.mark.parametrize("top_k", [1, 2])
    def test_balances_a_skewed_batch(self, top_k: int) -> None:
        made, x_TD = router("sinkhorn", top_k), tokens(512)
        with torch.no_grad():
            made.weight[:, 0] = torch.linspace(2.0, -2.0, EXPERTS)
        x_TD[:, 0] = 2.0
        load_E = made(x_TD, batch_of((1, 512))).stats["tokens_per_expert"]
        plain_E = torch.bincount((x_TD @ made.weight.T).topk(top_k).indices.flatten(), minlength=EXPERTS)
        assert plain_E.max() / plain_E.float().mean() > 3.0
        assert load_E.max() / load_E.mean() < 1.3

    def test_the_plan_gives_every_token_and_every_expert_its_share(self) -> None:
        plan_TE = balanced(3 * tokens(64, dim=EXPERTS).double(), None, 1000)
        torch.testing.assert_close(plan_TE.sum(0), torch.full((EXPERTS,), 1 / EXPERTS).double(), rtol=1e-3, atol=0)
        torch.testing.assert_close(plan_TE.sum(1), torch.full((64,), 1 / 64).double(), rtol=1e-2, atol=0)

    def test_a_host_that_reads_rarely_gets_the_same_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits_TE = 3 * tokens(64, dim=EXPERTS)
        wanted_TE = balanced(logits_TE, None, 101)
        monkeypatch.setattr("moefw.plugins.routers.sinkhorn.router.runs_ahead", lambda device: True)
        assert torch.equal(balanced(logits_TE, None, 101), wanted_TE)

    def test_large_logits_do_not_overflow(self) -> None:
        logits_TE = 1000.0 + tokens(64, dim=EXPERTS)
        assert balanced(logits_TE, None, 100).isfinite().all()
        torch.testing.assert_close(
            balanced(logits_TE, None, 100), balanced(logits_TE - 1000.0, None, 100), rtol=1e-3, atol=1e-9
        )

    def test_masked_tokens_scale_nothing(self) -> None:
        made, x_TD = router("sinkhorn", 2), tokens(21)
        masked = batch_of((3, 7), masked=True)
        whole = made(x_TD, masked).expert_ids_TK[masked.mask_T]
        assert torch.equal(whole, made(x_TD[masked.mask_T], batch_of((1, 10))).expert_ids_TK)

    def test_looks_at_a_token_alone_outside_training(self) -> None:
        made, x_TD = router("sinkhorn", 2), tokens(21)
        best_TK = (x_TD @ made.weight.T).topk(2).indices
        assert not torch.equal(made(x_TD, batch_of((3, 7))).expert_ids_TK, best_TK)
        made.eval()
        assert torch.equal(made(x_TD, batch_of((3, 7))).expert_ids_TK, best_TK)
        assert torch.equal(made(x_TD[:1], batch_of((1, 1))).expert_ids_TK, best_TK[:1])

    def test_replays_recorded_ids(self) -> None:
        made, x_TD = router("sinkhorn", 2), tokens(8)
        ids_TK: Tensor = torch.tensor([[0, 1]] * 7 + [[-1, 2]])
        routing = made(x_TD, batch_of((1, 8), routes={0: ids_TK}))
        assert torch.equal(routing.expert_ids_TK, ids_TK)
        assert torch.equal(routing.weights_TK == 0, ids_TK < 0)
        with pytest.raises(ContractError, match=r"and not \(8, 2\)"):
            made(x_TD, batch_of((1, 8), routes={0: ids_TK[1:]}))


class TestForced:
    @pytest.mark.parametrize("count", [0, 1, 5, 8, 13])
    @pytest.mark.parametrize("top_k", [1, 3, 8])
    def test_counts_are_known_beforehand_and_differ_by_one_at_most(self, count: int, top_k: int) -> None:
        routing = router("forced", top_k)(tokens(count), batch_of((1, count)))
        assert list(routing.counts_host) == routing.stats["tokens_per_expert"].tolist()
        assert max(routing.counts_host) - min(routing.counts_host) <= 1
        assert all(len(set(row)) == top_k for row in routing.expert_ids_TK.tolist())

    def test_counts_are_exchanged_where_ranks_may_differ(self) -> None:
        x_TD, made = tokens(8), router("forced", 2)
        assert made(x_TD, batch_of((1, 8), masked=True)).counts_host is None
        assert made.eval()(x_TD, batch_of((1, 8))).counts_host is None
        assert router("forced", 2, known_counts=False)(x_TD, batch_of((1, 8))).counts_host is None
