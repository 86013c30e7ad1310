"""Values, choices, losses and gradients of the top-k router equal fp64 formulas, for every score, K and group limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefw.compose.machine import lone_site
from moefw.core.errors import ContractError
from moefw.core.site import Dims, Machine
from moefw.core.stages import Batch, Routing
from moefw.plugins.routers.topk import TopK
from moefw.plugins.routers.topk.options import Balance, Capacity, Groups
from moefw.plugins.routers.topk.router import TopKRouter
from moefw.testing.choices import Rule, route

EXPERTS, DIM = 8, 16
SCORES: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax"},
    "pre_softmax": {"score": "softmax", "pre_softmax": True},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid_raw": {"score": "sigmoid", "renormalise": False},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "sqrtsoftplus_raw": {"score": "sqrtsoftplus", "renormalise": False},
}
CHOICES = {
    "one": (1, None),
    "some": (4, None),
    "all": (8, None),
    "one group": (4, (1, 1)),
    "all groups": (4, (4, 4)),
    "some groups": (4, (4, 2)),
    "groups of one": (2, (8, 2)),
    "one of two groups": (1, (2, 1)),
}
LEVELS = {"aux_coeff": "micro_batch", "sequence_aux_coeff": "sequence", "global_aux_coeff": "global_batch"}


def router(top_k: int = 2, experts: int = EXPERTS, dim: int = DIM, layer: int = 0, **options: Any) -> TopKRouter:
    site = lone_site(Dims(model_dim=dim, expert_dim=8, num_experts=experts, top_k=top_k), Machine(), layer=layer)
    declared = TopK(**options)
    assert not [problem for found in declared.check(site) for problem in found]
    made = TopKRouter(site, declared)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return made


def batch_of(shape: tuple[int, int], *, masked: bool = False, scale: float | None = None, **more: Any) -> Batch:
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = None
    if masked:
        mask = torch.ones(shape, dtype=torch.bool)
        mask[0], mask[-1, ::2] = False, False
    return Batch(
        ids_BS=ids, labels_BS=ids, mask_BS=mask, loss_scale=None if scale is None else torch.tensor(scale), **more
    )


def tokens(count: int, seed: int = 0, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def probe(routing: Routing, k: int) -> Tensor:
    return torch.randn(len(routing.weights_TK), k, generator=torch.Generator().manual_seed(5)).double()


def assert_equals_formulas(
    made: TopKRouter, rule: Rule, batch: Batch, *, rtol: float = 5e-6, seed: int = 0, **state: Any
) -> tuple[Routing, float]:
    """Compare choices, weights, losses and both gradients with fp64; return the routing and the worst error."""
    shape = batch.ids_BS.shape
    x_TD = tokens(shape.numel(), seed).requires_grad_()
    valid = torch.ones(len(x_TD), dtype=torch.bool) if batch.mask_T is None else batch.mask_T
    count = max(1, int(valid.sum()))
    routing = made(x_TD, batch)
    x, weight = x_TD.detach().double().requires_grad_(), made.weight.detach().double().requires_grad_()
    bias = torch.zeros(EXPERTS) if made.bias is None else made.bias.detach()
    bias = bias.double().requires_grad_()
    wanted = route(x @ weight.T + bias, rule, valid=valid, sequences=[shape[1]] * shape[0], **state)
    by_k = torch.arange(rule.top_k).double() + probe(routing, rule.top_k)
    ((routing.weights_TK * by_k.float()).sum()).backward()
    ((wanted.weights_TK * by_k).sum() + wanted.loss).backward()
    assert torch.equal(routing.expert_ids_TK, wanted.ids_TK)
    counts = torch.bincount(wanted.chosen_TK[wanted.chosen_TK >= 0], minlength=EXPERTS)
    assert torch.equal(routing.stats["tokens_per_expert"], counts.float())
    assert routing.weights_TK.dtype == torch.float32
    losses = sum((loss.item() for loss in routing.aux_losses.values()), 0.0) / count
    assert losses == pytest.approx(wanted.loss.item(), rel=1e-5, abs=1e-9)
    worst = 0.0
    pairs = [(routing.weights_TK, wanted.weights_TK), (x_TD.grad, x.grad), (made.weight.grad, weight.grad)]
    pairs += [] if made.bias is None else [(made.bias.grad, bias.grad)]
    for got, want in pairs:
        scale = max(want.abs().max().item(), 1e-3) if want.numel() else 1.0
        error = (got.double() - want).abs().max().item() / scale if want.numel() else 0.0
        worst = max(worst, error)
        assert error <= rtol, f"{error:.1e}"
    return routing, worst


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("score", "choice"),
    [(score, choice) for score in SCORES for choice in CHOICES if score != "softmax" or CHOICES[choice][0] > 1],
)
def test_every_score_chooses_and_weighs_as_its_formula_says(score: str, choice: str, masked: bool) -> None:
    k, groups = CHOICES[choice]
    options = SCORES[score]
    made = router(k, groups=None if groups is None else Groups(count=groups[0], keep=groups[1]), scale=2.5, **options)
    rule = Rule(top_k=k, groups=groups, scale=2.5, **options)
    assert_equals_formulas(made, rule, batch_of((3, 7), masked=masked))


@pytest.mark.parametrize("score", SCORES)
def test_a_learned_bias_is_added_to_the_logits(score: str) -> None:
    made = router(2, bias=True, **SCORES[score])
    assert_equals_formulas(made, Rule(top_k=2, **SCORES[score]), batch_of((3, 7)))


@pytest.mark.parametrize("best", [1, 2])
def test_a_group_may_be_scored_by_fewer_than_are_chosen_from_it(best: int) -> None:
    """DeepSeek-V3 as in ``transformers``: by the best two, whatever top_k is."""
    made = router(3, score="sigmoid", groups=Groups(count=4, keep=2, best=best))
    rule = Rule(top_k=3, score="sigmoid", groups=(4, 2), group_best=best)
    assert_equals_formulas(made, rule, batch_of((3, 7)))


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_moves_choices_and_groups_but_no_weight(score: str) -> None:
    made = router(4, score=score, groups=Groups(count=4, keep=2), balance=(Balance(kind="expert_bias"),))
    made.expert_bias.copy_(torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)))
    rule = Rule(top_k=4, score=score, groups=(4, 2))
    biased, _ = assert_equals_formulas(made, rule, batch_of((3, 7)), bias_E=made.expert_bias)
    made.expert_bias.zero_()
    assert not torch.equal(biased.expert_ids_TK, made(tokens(21), batch_of((3, 7))).expert_ids_TK)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_balance_loss_equals_its_formula_gradients_included(level: str, score: str, masked: bool) -> None:
    valid = 21 if not masked else 10
    made = router(2, balance=(Balance(kind="aux_loss", coeff=0.7, over=LEVELS[level]),), **SCORES[score])
    load_E = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(3)) * 2
    if level == "global_aux_coeff":
        made.global_load.copy_(load_E)
    rule = Rule(top_k=2, **{level: 0.7}, **SCORES[score])
    batch = batch_of((3, 7), masked=masked, scale=1.0 / valid)
    if masked:
        assert int(batch.mask_BS.sum()) == valid
    assert_equals_formulas(made, rule, batch, load_E=load_E)


def test_all_losses_may_stand_side_by_side_under_their_names() -> None:
    rules = [Balance(kind="aux_loss", over=level, coeff=0.1 * (i + 1)) for i, level in enumerate(LEVELS.values())]
    made = router(2, score="sigmoid", balance=(*rules, Balance(kind="z_loss", coeff=0.01)))
    rule = Rule(top_k=2, aux_coeff=0.1, sequence_aux_coeff=0.2, global_aux_coeff=0.3, z_coeff=0.01)
    batch = batch_of((3, 7), scale=1 / 21)
    routing, _ = assert_equals_formulas(made, rule, batch, load_E=torch.ones(EXPERTS))
    assert set(routing.aux_losses) == {"aux_loss", "sequence_aux_loss", "global_aux_loss", "z_loss"}
    assert not any(loss.requires_grad for loss in routing.aux_losses.values())


def test_the_map_of_the_balance_loss_knows_no_bias_no_groups_and_no_replay() -> None:
    plain = router(4, score="sigmoid", balance=(Balance(kind="aux_loss"),))
    rules = (Balance(kind="aux_loss"), Balance(kind="expert_bias"))
    limited = router(4, score="sigmoid", balance=rules, groups=Groups(count=4, keep=2))
    limited.expert_bias[0] = 5.0
    x_TD, batch = tokens(21), batch_of((3, 7))
    one, other = plain(x_TD, batch), limited(x_TD, batch)
    assert not torch.equal(one.expert_ids_TK, other.expert_ids_TK)
    assert torch.equal(one.aux_losses["aux_loss"], other.aux_losses["aux_loss"])
    replayed = plain(x_TD, batch_of((3, 7), routes={0: other.expert_ids_TK}))
    grouped = router(4, score="sigmoid", balance=(Balance(kind="aux_loss"),), groups=Groups(count=4, keep=2))
    for routing in (replayed, grouped(x_TD, batch)):
        assert not torch.equal(one.expert_ids_TK, routing.expert_ids_TK)
        assert torch.equal(one.aux_losses["aux_loss"], routing.aux_losses["aux_loss"])


@pytest.mark.parametrize("score", SCORES)
def test_ties_are_broken_the_same_way_every_time_among_the_best(score: str) -> None:
    made = router(3, **SCORES[score])
    with torch.no_grad():
        made.weight.copy_(made.weight[torch.tensor([0, 1, 1, 1, 1, 2, 2, 2])])
    x_TD = tokens(40)
    routing = made(x_TD, batch_of((1, 40)))
    logits_TE = x_TD.double() @ made.weight.detach().double().T
    chosen_TK = logits_TE.gather(1, routing.expert_ids_TK)
    torch.testing.assert_close(chosen_TK.sort(-1).values, logits_TE.topk(3).values.sort(-1).values)
    assert all(len(set(row)) == 3 for row in routing.expert_ids_TK.tolist())
    assert torch.equal(routing.expert_ids_TK, made(x_TD, batch_of((1, 40))).expert_ids_TK)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
@pytest.mark.parametrize("score", SCORES)
def test_no_tokens_route_nowhere_and_leave_zero_gradients(score: str, shape: tuple[int, int]) -> None:
    rules = [Balance(kind="aux_loss", over=level) for level in LEVELS.values()]
    made = router(2, balance=(*rules, Balance(kind="z_loss")), jitter=0.1, **SCORES[score])
    batch = batch_of(shape, scale=1.0, seeds_B=torch.arange(shape[0]))
    routing = made(tokens(0).requires_grad_(), batch)
    assert routing.expert_ids_TK.shape == (0, 2)
    assert all(loss.item() == 0.0 for loss in routing.aux_losses.values())
    routing.weights_TK.sum().backward()
    assert made.weight.grad.abs().max() == 0.0


@pytest.mark.parametrize("score", SCORES)
def test_hopeless_logits_give_finite_weights_and_gradients(score: str) -> None:
    made = router(2, balance=(Balance(kind="aux_loss"), Balance(kind="z_loss")), **SCORES[score])
    with torch.no_grad():
        made.weight.fill_(-30.0)
        made.weight[0] = 30.0
    x_TD = torch.ones(4, DIM).requires_grad_()
    routing = made(torch.cat([x_TD, -x_TD]), batch_of((2, 4), scale=0.1))
    (routing.weights_TK * torch.tensor([1.0, 2.0])).sum().backward()
    assert routing.weights_TK.isfinite().all()
    assert made.weight.grad.isfinite().all()


@pytest.mark.parametrize("score", SCORES)
def test_fp64_comes_closer_to_the_truth_than_fp32(score: str) -> None:
    worst = {}
    for dtype in ("fp32", "fp64"):
        rules = (Balance(kind="aux_loss", coeff=0.1), Balance(kind="z_loss", coeff=0.1))
        made = router(2, dtype=dtype, balance=rules, **SCORES[score])
        rule = Rule(top_k=2, aux_coeff=0.1, z_coeff=0.1, **SCORES[score])
        routing, worst[dtype] = assert_equals_formulas(made, rule, batch_of((3, 7), scale=1 / 21))
        assert routing.scores_TE.dtype == {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    assert worst["fp64"] < 1.2e-7, "one rounding to fp32"
    assert worst["fp64"] < worst["fp32"]


class TestJitter:
    def test_multiplies_what_the_router_reads_in_training_only(self) -> None:
        plain, shaken = router(score="sigmoid"), router(score="sigmoid", jitter=0.3)
        x_TD, batch = tokens(12).requires_grad_(), batch_of((3, 4), seeds_B=torch.tensor([5, 6, 7]))
        moved = shaken(x_TD, batch)
        assert not torch.equal(moved.scores_TE, plain(x_TD, batch).scores_TE)
        moved.weights_TK[:, 0].sum().backward()
        assert x_TD.grad.isfinite().all()
        assert torch.equal(shaken.eval()(x_TD, batch).scores_TE, plain(x_TD, batch).scores_TE)
        assert torch.equal(shaken.train()(x_TD, batch_of((3, 4))).scores_TE, plain(x_TD, batch).scores_TE)

    def test_stays_within_its_bounds_and_fills_them(self) -> None:
        made = router(experts=4, dim=4, score="sigmoid", jitter=0.25, dtype="fp64")
        with torch.no_grad():
            made.weight.copy_(torch.eye(4))
        batch = batch_of((2, 500), seeds_B=torch.tensor([1, 2]))
        factors = made(torch.ones(1000, 4), batch).scores_TE.logit()
        assert factors.min() >= 0.75
        assert factors.min() < 0.752
        assert 1.248 < factors.max() <= 1.25
        assert factors.mean().item() == pytest.approx(1.0, abs=0.01)

    def test_is_the_same_however_the_batch_is_split_and_another_in_another_layer(self) -> None:
        made, x_TD, seeds_B = router(score="sigmoid", jitter=0.3), tokens(12), torch.tensor([5, 6, 7])
        whole = made(x_TD, batch_of((3, 4), seeds_B=seeds_B)).scores_TE
        for row in (2, 0, 1):
            part = made(x_TD[4 * row : 4 * row + 4], batch_of((1, 4), seeds_B=seeds_B[row : row + 1]))
            assert torch.equal(part.scores_TE, whole[4 * row : 4 * row + 4])
        other = router(score="sigmoid", jitter=0.3, layer=1)(x_TD, batch_of((3, 4), seeds_B=seeds_B))
        assert not torch.equal(other.scores_TE, whole)

    def test_needs_the_tokens_of_the_batch(self) -> None:
        with pytest.raises(ContractError, match="11 tokens, and the batch has 12"):
            router(score="sigmoid", jitter=0.3)(tokens(11), batch_of((3, 4), seeds_B=torch.arange(3)))


class TestReplay:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("score", SCORES)
    def test_takes_recorded_ids_and_todays_scores(self, score: str, masked: bool) -> None:
        made = router(2, layer=3, balance=(Balance(kind="z_loss"),), **SCORES[score])
        x_TD, weights = tokens(21).requires_grad_(), torch.arange(42.0).view(21, 2)
        first = made(x_TD, batch_of((3, 7), masked=masked, scale=1.0))
        (first.weights_TK * weights).sum().backward()
        wanted, made.weight.grad = made.weight.grad, None
        routes = {3: first.expert_ids_TK}
        again = made(x_TD, batch_of((3, 7), masked=masked, scale=1.0, routes=routes))
        (again.weights_TK * weights).sum().backward()
        assert torch.equal(again.expert_ids_TK, first.expert_ids_TK)
        assert torch.equal(again.weights_TK, first.weights_TK)
        assert torch.equal(made.weight.grad, wanted)

    def test_keeps_ids_when_the_weights_have_moved_and_ignores_other_layers(self) -> None:
        made, x_TD = router(2, layer=3, score="sigmoid"), tokens(21)
        ids_TK = made(x_TD, batch_of((3, 7))).expert_ids_TK
        with torch.no_grad():
            made.weight.copy_(made.weight.flip(0))
        again = made(x_TD, batch_of((3, 7), routes={3: ids_TK}))
        free = made(x_TD, batch_of((3, 7), routes={2: ids_TK}))
        assert torch.equal(again.expert_ids_TK, ids_TK)
        assert not torch.equal(free.expert_ids_TK, ids_TK)
        chosen_TK = again.scores_TE.gather(1, ids_TK)
        torch.testing.assert_close(again.weights_TK, chosen_TK / chosen_TK.sum(-1, keepdim=True))
        assert torch.equal(again.stats["tokens_per_expert"], torch.bincount(ids_TK.flatten(), minlength=8).float())

    @pytest.mark.parametrize("score", SCORES)
    def test_dropped_choices_stay_dropped_and_the_others_share_the_weight(self, score: str) -> None:
        made = router(2, **SCORES[score])
        ids_TK = torch.tensor([[3, 1], [-1, 5], [4, -1], [-1, -1]])
        routing = made(tokens(4), batch_of((1, 4), routes={0: ids_TK}))
        routing.weights_TK.sum().backward()
        assert torch.equal(routing.expert_ids_TK, ids_TK)
        assert torch.equal(routing.weights_TK == 0, ids_TK < 0)
        assert made.weight.grad.isfinite().all()
        if score in ("softmax", "sigmoid", "sqrtsoftplus"):
            torch.testing.assert_close(routing.weights_TK.sum(-1), torch.tensor([1.0, 1.0, 1.0, 0.0]))

    @pytest.mark.parametrize("ids_TK", [torch.zeros(3, 2).long(), torch.zeros(4, 1).long(), torch.zeros(4, 2)])
    def test_of_another_shape_or_dtype_is_refused(self, ids_TK: Tensor) -> None:
        with pytest.raises(ContractError, match=r"the routes of layer 0 are .* and not \(4, 2\) torch.int64"):
            router(2, score="sigmoid")(tokens(4), batch_of((1, 4), routes={0: ids_TK}))

    @pytest.mark.parametrize("drop", ["probs", "position"])
    @pytest.mark.parametrize("score", SCORES)
    def test_of_choices_before_a_capacity_drops_the_same_and_weighs_the_same(self, score: str, drop: str) -> None:
        made = router(2, **SCORES[score], capacity=Capacity(factor=0.5, drop=drop))
        first = made(tokens(32), batch_of((1, 32)))
        again = made(tokens(32), batch_of((1, 32), routes={0: first.choices_TK}))
        assert first.stats["dropped_choices"] > 0
        assert torch.equal(again.expert_ids_TK, first.expert_ids_TK)
        assert torch.equal(again.weights_TK, first.weights_TK)
        assert all(torch.equal(again.stats[name], value) for name, value in first.stats.items())
