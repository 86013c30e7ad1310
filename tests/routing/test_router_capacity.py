"""A capacity keeps exactly the choices that a loop over experts keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router_topk import EXPERTS, SCORES, assert_equals_formulas, batch_of, router, tokens

from moefw.plugins.routers.topk.options import Balance, Capacity
from moefw.testing.choices import Rule
from moefw_kernels.routing import within_capacity

POLICIES = ("probs", "position")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 1.25, 100.0])
@pytest.mark.parametrize("drop", POLICIES)
@pytest.mark.parametrize("score", SCORES)
def test_what_is_kept_equals_a_loop(score: str, drop: str, factor: float, masked: bool) -> None:
    made = router(2, capacity=Capacity(factor=factor, drop=drop), **SCORES[score])
    rule = Rule(top_k=2, capacity=(factor, drop), **SCORES[score])
    routing, _ = assert_equals_formulas(made, rule, batch_of((3, 11), masked=masked))
    dropped = routing.stats["tokens_per_expert"].sum() - (routing.expert_ids_TK >= 0).sum()
    assert routing.stats["dropped_choices"].item() == dropped.item()
    assert routing.stats["dropped_choices"].shape == ()
    if factor >= EXPERTS / 2:
        assert dropped == 0


@settings(max_examples=200)
@given(st.data())
def test_every_kept_set_equals_a_loop_ties_and_absent_choices_included(data: st.DataObject) -> None:
    count, k = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3))
    flat = st.lists(st.integers(-1, 3), min_size=count * k, max_size=count * k)
    ids_TK = torch.tensor(data.draw(flat), dtype=torch.int64).view(count, k)
    values = st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=count * k, max_size=count * k)
    weights_TK = torch.tensor(data.draw(values)).view(count, k)
    capacity = data.draw(st.integers(0, 5))
    for by in (None, weights_TK):
        wanted = torch.zeros_like(ids_TK, dtype=torch.bool)
        for expert in range(4):
            takers = [(t, c) for t in range(count) for c in range(k) if ids_TK[t, c] == expert]
            if by is not None:
                takers = sorted(takers, key=lambda taker: (-by[taker].item(), taker))
            for taker in takers[:capacity]:
                wanted[taker] = True
        assert torch.equal(within_capacity(ids_TK, capacity, 4, by=by), wanted)


@pytest.mark.parametrize("drop", POLICIES)
def test_ties_go_to_the_first_tokens(drop: str) -> None:
    made = router(2, score="sigmoid", capacity=Capacity(factor=1.0, drop=drop))
    routing = made(tokens(1).expand(16, -1), batch_of((1, 16)))
    assert (routing.expert_ids_TK[:4] >= 0).all()
    assert (routing.expert_ids_TK[4:] == -1).all()
    assert (routing.weights_TK[4:] == 0).all()
    assert routing.weights_TK[0].sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("pad", [False, True])
def test_evaluation_without_budgets_drops_nothing_and_a_step_that_runs_again_drops_the_same(pad: bool) -> None:
    free, capped = router(2, score="sigmoid"), router(2, score="sigmoid", capacity=Capacity(factor=0.5, pad=pad))
    x_TD, batch = tokens(40), batch_of((1, 40))
    again = replace(batch, dropless=True)
    assert torch.equal(capped(x_TD, again).expert_ids_TK, capped(x_TD, batch).expert_ids_TK)
    routing = capped.eval()(x_TD, again)
    assert torch.equal(routing.expert_ids_TK, free(x_TD, batch).expert_ids_TK)
    assert routing.capacity == (40 if pad else None)
    assert routing.stats["dropped_choices"] == 0


def test_the_weights_that_are_left_stay_as_they_are() -> None:
    free, capped = router(2, score="sigmoid"), router(2, score="sigmoid", capacity=Capacity(factor=0.5))
    x_TD, batch = tokens(40), batch_of((1, 40))
    before, after = free(x_TD, batch), capped(x_TD, batch)
    kept = after.expert_ids_TK >= 0
    assert kept.any()
    assert (~kept).any()
    assert torch.equal(after.weights_TK, before.weights_TK * kept)
    assert torch.equal(after.stats["tokens_per_expert"], before.stats["tokens_per_expert"]), "before dropping"


def test_losses_are_those_without_a_capacity() -> None:
    rules = (Balance(kind="aux_loss", coeff=1.0), Balance(kind="z_loss", coeff=1.0))
    free, capped = router(2, balance=rules), router(2, balance=rules, capacity=Capacity(factor=0.5))
    x_TD, batch = tokens(40), batch_of((1, 40))
    assert free(x_TD, batch).aux_losses == capped(x_TD, batch).aux_losses


@pytest.mark.parametrize("factor", [0.1, 0.3, 1.0, 1.1, 1.5, 2.2])
@pytest.mark.parametrize("count", [0, 1, 5, 10, 40, 100, 4096])
def test_the_size_is_exact_in_decimal_arithmetic(count: int, factor: float) -> None:
    made = router(2, score="sigmoid", capacity=Capacity(factor=factor, pad=True))
    exact = Fraction(round(factor * 10), 10) * count * 2 / EXPERTS
    assert made(tokens(count), batch_of((1, count))).capacity == math.ceil(exact)


def test_padding_is_asked_for_only_if_wanted() -> None:
    made = router(2, score="sigmoid", capacity=Capacity(factor=1.0))
    assert made(tokens(10), batch_of((1, 10))).capacity is None


def test_no_tokens_and_fewer_tokens_than_the_capacity_drop_nothing() -> None:
    made = router(2, score="sigmoid", capacity=Capacity(factor=4.0))
    for count in (0, 1, 3):
        routing = made(tokens(count), batch_of((1, count)))
        assert (routing.expert_ids_TK >= 0).all()
        assert routing.stats["dropped_choices"].item() == 0.0


def test_with_as_many_choices_as_experts_each_expert_chooses_its_tokens() -> None:
    made = router(EXPERTS, pre_softmax=True, capacity=Capacity(factor=0.25))
    x_TD = tokens(40)
    routing = made(x_TD, batch_of((1, 40)))
    scores_TE = (x_TD @ made.weight.T).softmax(-1)
    takes_TE = torch.zeros_like(scores_TE).scatter(0, scores_TE.topk(10, dim=0).indices, 1.0)
    ids_TK = routing.expert_ids_TK.where(routing.expert_ids_TK >= 0, EXPERTS)
    weights_TE = torch.zeros(40, EXPERTS + 1).scatter(1, ids_TK, routing.weights_TK)[:, :EXPERTS]
    assert torch.allclose(weights_TE, scores_TE * takes_TE)
    assert len(set(takes_TE.sum(1).tolist())) > 3, "tokens have unlike numbers of experts"
