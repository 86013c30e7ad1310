"""A router's updates from a global batch: independent of its split, and one step late."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_router_topk import EXPERTS, batch_of, router, tokens
from torch import Tensor

from moefw.core.contracts import Router
from moefw.core.records import Shard
from moefw.core.stages import Routing
from moefw.plugins.routers.topk.losses import sequences
from moefw.plugins.routers.topk.options import Balance
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.testing.choices import Rule, route


def summed(routings: Sequence[Routing]) -> dict[str, Tensor]:
    """Sum statistics as the engine does: in fp64, over micro-batches and ranks."""
    return {name: sum(r.stats[name].double() for r in routings) for name in routings[0].stats}


def states(made: Router) -> dict[str, Tensor]:
    return {state.name: getattr(made, state.name).clone() for state in made.state_spec()}


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([{"kind": "expert_bias"}], ["expert_bias"]),
        ([{"kind": "quantile"}], ["quantile_beta"]),
        ([{"kind": "aux_loss", "over": "global_batch"}], ["global_load"]),
        ([{"kind": "expert_bias"}, {"kind": "aux_loss", "over": "global_batch"}], ["expert_bias", "global_load"]),
        ([{"kind": "aux_loss"}, {"kind": "aux_loss", "over": "sequence"}, {"kind": "z_loss"}], []),
    ],
)
def test_state_is_declared_saved_and_written_by_update_only(rules: list[dict[str, str]], names: list[str]) -> None:
    made = router(2, score="sigmoid", balance=tuple(Balance(**rule) for rule in rules))
    spec = made.state_spec()
    assert [(state.name, state.shape, state.saved) for state in spec] == [(name, (EXPERTS,), True) for name in names]
    before = states(made)
    routing = made(tokens(24), batch_of((3, 8), scale=1.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in states(made).items())
    made.update(summed([routing]))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in states(made).items())
    assert all(getattr(made, name).dtype == torch.float32 for name in names)


class TestGlobalBatch:
    def made(self):
        return router(2, score="sigmoid", balance=(Balance(kind="aux_loss", over="global_batch", coeff=1.0),))

    def test_the_load_starts_even_and_is_that_of_the_last_whole_batch(self) -> None:
        made, x_TD = self.made(), tokens(24)
        assert made.global_load.tolist() == [1.0] * EXPERTS
        made.update(summed([made(x_TD[:9], batch_of((1, 9))), made(x_TD[9:], batch_of((3, 5)))]))
        best = (x_TD @ made.weight.T).topk(2).indices
        wanted = torch.bincount(best.flatten(), minlength=EXPERTS) * EXPERTS / (24 * 2)
        torch.testing.assert_close(made.global_load, wanted)
        kept = made.global_load.clone()
        made.update(summed([made(tokens(0), batch_of((1, 0)))]))
        assert torch.equal(made.global_load, kept), "no token, no news"

    @pytest.mark.parametrize("cuts", [[24], [12, 12], [1, 23], [0, 8, 8, 8]])
    def test_no_split_changes_loss_gradient_or_update(self, cuts: list[int]) -> None:
        made, x_TD = self.made(), tokens(24)
        made.global_load.copy_(torch.linspace(0.2, 1.8, EXPERTS))
        rule = Rule(top_k=2, global_aux_coeff=1.0)
        weight = made.weight.detach().double().requires_grad_()
        wanted = route(x_TD.double() @ weight.T, rule, load_E=made.global_load).loss
        wanted.backward()
        routings = [made(part, batch_of((1, len(part)), scale=1 / 24)) for part in x_TD.split(cuts)]
        sum(routing.weights_TK.sum() for routing in routings).sub(24.0).backward()
        loss = sum(routing.aux_losses["global_aux_loss"] for routing in routings) / 24
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        torch.testing.assert_close(made.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-7)
        made.update(summed(routings))
        whole = self.made()
        whole.update(summed([whole(x_TD, batch_of((1, 24)))]))
        assert torch.equal(made.global_load, whole.global_load)

    def test_it_counts_plain_choices_and_not_biased_ones(self) -> None:
        rules = (Balance(kind="aux_loss", over="global_batch"), Balance(kind="expert_bias"))
        made = router(2, score="sigmoid", balance=rules)
        made.expert_bias[0] = 9.0
        routing = made(tokens(24), batch_of((3, 8)))
        assert routing.stats["tokens_per_expert"][0] == 24
        assert routing.stats["global_choices"][0] < 24
        assert routing.stats["global_choices"].sum() == 48


def fair_beta(logits: Tensor, beta_E: Tensor, top_k: int) -> Tensor:
    """Beta that would have given each expert its fair share of these tokens (N >= 1), expert by expert.

    It is the ``floor(N K / E) + 1``-th largest ``logit - alpha``; alpha is a token's ``K + 1``-th largest
    ``logit - beta``.
    """
    tokens, num_experts = logits.shape
    alpha = [sorted((logits[t] - beta_E).tolist(), reverse=True)[top_k] for t in range(tokens)]
    place = tokens * top_k // num_experts
    margins = [
        sorted((logits[t, e].item() - alpha[t] for t in range(tokens)), reverse=True) for e in range(num_experts)
    ]
    return torch.tensor([margin[place] for margin in margins], dtype=torch.float64)


class TestQuantile:
    def made(self, top_k: int = 2, ema: float = 0.0, score: str = "softmax", **options):
        return router(top_k, score=score, balance=(Balance(kind="quantile", ema=ema),), **options)

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dtype", ["fp32", "fp64"])
    @pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
    def test_choices_weights_and_thresholds_equal_their_formulas(self, score: str, dtype: str, masked: bool) -> None:
        made = self.made(3, score=score, dtype=dtype)
        made.quantile_beta.copy_(torch.randn(EXPERTS, generator=torch.Generator().manual_seed(4)))
        batch, x_TD = batch_of((3, 7), masked=masked), tokens(21)
        valid = torch.ones(21, dtype=torch.bool) if batch.mask_T is None else batch.mask_T
        logits = (x_TD.double() @ made.weight.double().T).detach()
        wanted = route(logits, Rule(top_k=3, score=score), beta_E=made.quantile_beta, valid=valid)
        routing = made(x_TD, batch)
        assert torch.equal(routing.expert_ids_TK, wanted.ids_TK)
        torch.testing.assert_close(routing.weights_TK.double(), wanted.weights_TK, rtol=1e-5, atol=1e-6)
        beta_E = fair_beta(logits[valid], made.quantile_beta.double(), 3)
        assert routing.stats["quantile_tokens"].tolist() == [int(valid.sum())]
        torch.testing.assert_close(
            routing.stats["quantile_sum"].double() / int(valid.sum()), beta_E, rtol=1e-5, atol=1e-5
        )

    def test_an_update_is_a_moving_average_weighted_by_tokens(self) -> None:
        made = self.made(ema=0.75)
        made.quantile_beta.fill_(1.0)
        reduced = {"quantile_sum": torch.full((EXPERTS,), 30.0), "quantile_tokens": torch.tensor([10.0])}
        made.update({**reduced, "tokens_per_expert": torch.zeros(EXPERTS)})
        assert made.quantile_beta.tolist() == [1.5] * EXPERTS

    @pytest.mark.parametrize("batch", [batch_of((1, 0)), batch_of((1, 6), masked=True)], ids=["none", "all masked"])
    def test_no_valid_token_says_nothing(self, batch) -> None:
        made = self.made()
        made.quantile_beta.fill_(1.0)
        routing = made(tokens(batch.ids_BS.numel()), batch_of((1, 0)) if not batch.ids_BS.numel() else all_masked(6))
        assert routing.stats["quantile_sum"].tolist() == [0.0] * EXPERTS
        made.update(summed([routing]))
        assert made.quantile_beta.tolist() == [1.0] * EXPERTS

    @pytest.mark.parametrize("score", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("ema", [0.0, 0.7])
    def test_drives_a_skewed_load_to_balance_in_some_updates(self, score: str, ema: float) -> None:
        made = self.made(score=score, ema=ema)
        with torch.no_grad():
            made.weight[:, 0] = torch.linspace(3.0, -3.0, EXPERTS)
        loads = []
        for step in range(25):
            x_TD = tokens(512, seed=step)
            x_TD[:, 0] = 2.0
            routing = made(x_TD, batch_of((8, 64)))
            load_E = routing.stats["tokens_per_expert"]
            loads.append((load_E.max() / load_E.mean()).item())
            made.update(summed([routing]))
        assert loads[0] > 2.5
        assert max(loads[-5:]) < 1.4, loads


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 3]),
    packed=st.booleans(),
)
def test_segments_of_sequences_ascend_on_each_rank_and_have_all_tokens(
    counts: list[int], cp: int, tp: int, packed: bool
) -> None:
    """The kernels of balance losses rely on it."""
    counts = counts if packed else [3] * len(counts)
    lengths = [count * 2 * cp * tp for count in counts]
    shape = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    seen = torch.zeros(len(lengths), dtype=torch.int64)
    for index, part in itertools.product(range(cp), range(tp)):
        batch = batch_of(shape)
        if packed:
            documents_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            batch = replace(batch, lengths=tuple(lengths), documents_BS=documents_S.unsqueeze(0))
        layout: Any = SimpleNamespace(size=lambda _: cp, index=lambda _, index=index: index, group=lambda _: None)
        batch = SequenceCut(layout).part(batch)
        own = replace(batch, part=Shard(0, part, tp, "tp") if tp > 1 else None)
        num_tokens = batch.ids_BS.numel() // tp
        segments = sequences(own, num_tokens)
        assert segments.count == len(lengths)
        if segments.segment_T is None:
            seen += num_tokens // segments.count
            continue
        assert len(segments.segment_T) == num_tokens
        assert (segments.segment_T.diff() >= 0).all()
        seen += segments.segment_T.bincount(minlength=segments.count)
    assert seen.tolist() == lengths


def all_masked(count: int):
    batch = batch_of((1, count), masked=True)
    assert batch.mask_BS is not None
    assert not batch.mask_BS.any()
    return batch
