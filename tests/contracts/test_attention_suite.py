"""The suite of attentions: the built-in ones pass it, and those that are broken on purpose do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import broken_attentions as attentions
from moefw.core.errors import PlanError
from moefw.plugins.attention.gqa import GroupedQuery
from moefw.plugins.attention.mla import Latent
from moefw.testing.suites.attention import AttentionSuite

BROKEN: list[tuple[Any, str, str]] = [
    (attentions.ForgetsTheTables, "its_methods_take", "__call__(x_tD, tables, batch): too many positional arguments"),
    (attentions.MisspellsItsOffer, "its_offers_are_values", "knows 'wights'"),
    (attentions.RemembersInItsModule, "the_modules_of_its_package", "writes broken_attentions.SEEN.members"),
    (attentions.FailsAlone, "returns_a_row", "of 1 sequences of 1 tokens"),
    (attentions.SeesAhead, "a_token_sees", "depends on later tokens"),
    (attentions.IgnoresDocuments, "a_token_sees", "depends on another document"),
    (attentions.MixesSequences, "a_token_sees", "depends on another sequence"),
    (attentions.CountsPositionsItself, "equals_its_formula", "stride=3"),
    (attentions.ForgetsTheFirst, "packed_documents", "the output changes if documents are packed"),
    (attentions.HalfScale, "equals_its_formula", "the output is not that of its formula"),
    (attentions.Remembers, "keeps_nothing", "writes last in forward or backward"),
    (attentions.WritesIntoTokens, "keeps_nothing", "writes into the tokens"),
    (attentions.EntersNoRegion, "promised_regions", "offers the regions core_attn. Is context.region(...) used"),
    (attentions.AddsTheBiasOnEveryRank, "heads_split", "the output changes with heads split over 2 ranks"),
    (attentions.CountsPlacesItself, "sequences_shared", "the output changes with sequences shared by 2 ranks of cp"),
    (attentions.CountsPlacesAroundAnotherCore, "sequences_shared", "shared by 2 ranks of cp (ulysses)"),
    (attentions.CapsScoresUnsaid, "sequences_shared", "allgather_kv computes with PyTorch's kernels"),
    (attentions.SaysNotWhoSharesABatch, "sequences_shared", "Make it by Mask.of(batch)"),
    (attentions.OneRecipe, "products_keep", "the module's recipe serves several GEMMs"),
    (attentions.LosesKeys, "products_keep", "has 0 of"),
    (attentions.OffersAdaptersAlone, "products_with_adapters", "adapter attention.q_proj, but asks for none"),
    (attentions.ExchangesAdapters, "products_with_adapters", "is not that of weights merged with adapters"),
    (attentions.IgnoresAdaptersOfTheLast, "products_with_adapters", "is not that of weights merged with adapters"),
    (attentions.ForgetsTheShardOfAdapters, "products_with_adapters", "ranks of tp, asks for an adapter of q_proj"),
    (attentions.OffersLogitsOfCappedScores, "logits_that_are_told", "from that of q k times the scale"),
    (attentions.NormsQueries, "logits_shrink", "with the rows of head 0 of keys scaled, logits are off"),
    (attentions.ForgetsBiasesOfHeads, "logits_shrink", "Does logit_rows() name all rows"),
    (attentions.TakesTurnsWithHeads, "logits_shrink", "with the rows of head 0 of keys scaled, logits are off"),
    (attentions.HidesItsCore, "logits_shrink", "Let it assign context.core(...) to an attribute"),
    (attentions.NamesRowsOfNoTensor, "logits_shrink", "and has no tensor of that name"),
    (attentions.NamesTooFewRows, "logits_shrink", "which has 16 rows"),
    (attentions.NamesNoRows, "logits_shrink", "Let logit_rows() say which make them"),
    (attentions.ForgetsThePast, "goes_on", "the output changes if tokens are read in pieces of (1, 1"),
    (attentions.KeepsTablesByShape, "a_batch_of_the_shape", "Is a table or a mask kept by the shape?"),
    (attentions.KeepsTablesByShape, "goes_on", "Is a table or a mask kept by the shape?"),
    (attentions.ClaimsAShortReach, "goes_on", "with the past within reach=2"),
    (attentions.WritesIntoThePast, "goes_on", "writes into the past"),
    (attentions.ExtendsInForward, "goes_on", "forward calls extend"),
]


def rope(x_SHd: Tensor, positions_S: Tensor, *, neighbours: bool = False) -> Tensor:
    """Turn pairs of values by position times 10000^(-2i/d)."""
    width = x_SHd.shape[-1]
    angles = positions_S.unsqueeze(1) * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    pairs = x_SHd.unflatten(-1, (-1, 2)) if neighbours else torch.stack(x_SHd.chunk(2, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return torch.cat([turned[..., 0], turned[..., 1]], -1)


def softmax(
    q_SHd: Tensor,
    k_SHd: Tensor,
    v_SHe: Tensor,
    scale: float,
    seen_SS: Tensor,
    sinks_H: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """Return the rows ``(S, H e)`` of a dense softmax, head by head."""
    heads = []
    for head in range(q_SHd.shape[1]):
        scores = q_SHd[:, head] @ k_SHd[:, head].T * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen_SS, -torch.inf)
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[head].expand(len(scores), 1)], 1)
        heads.append(scores.softmax(1)[:, : len(scores)] @ v_SHe[:, head])
    return torch.cat(heads, 1)


def seen(length: int, window: int | None = None) -> Tensor:
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def projected(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def plain(weights: Mapping[str, Tensor], x_SD: Tensor, positions_S: Tensor, cap: float | None = None) -> Tensor:
    q, k, v = (projected(weights, f"{name}_proj", x_SD).unflatten(1, (-1, attentions.WIDTH)) for name in "qkv")
    q, k = rope(q, positions_S), rope(k, positions_S)
    return projected(weights, "o_proj", softmax(q, k, v, attentions.WIDTH**-0.5, seen(len(x_SD)), None, cap))


@pytest.mark.parametrize(("made", "check", "says"), BROKEN, ids=[f"{case[0].__name__}: {case[1]}" for case in BROKEN])
def test_what_is_broken_is_caught_and_named(must_catch: Callable[..., None], made: Any, check: str, says: str) -> None:
    suite = type("Suite", (AttentionSuite,), {"reference": staticmethod(plain)})
    must_catch(suite, attentions.PLUGINS[made], check, says)


class TestPlainAttention(AttentionSuite):
    plugin = attentions.PLUGINS[attentions.PlainAttention]
    reference = staticmethod(plain)


class TestAdaptedAttention(AttentionSuite):
    plugin = attentions.PLUGINS[attentions.AdaptedAttention]
    reference = staticmethod(plain)


class TestCapsScores(AttentionSuite):
    plugin = attentions.PLUGINS[attentions.CapsScores]
    reference = staticmethod(partial(plain, cap=attentions.CAP))

    @pytest.mark.parametrize("use", ["allgather_kv", "ring_attention"])
    def test_ranks_that_compute_by_pytorch_are_refused_and_others_named(self, use: str) -> None:
        with pytest.raises(PlanError) as refused:
            self._on_ranks(2, "cp", context_parallel={"use": use}).resolve()
        (problem,) = refused.value.problems
        assert f"{use} needs attention around the core sdpa: it computes with PyTorch's" in problem.what
        assert "caps-scores offers own" in problem.what
        assert "context_parallel: {use: ulysses}" in problem.fix
        self._on_ranks(2, "cp", context_parallel={"use": "ulysses"}).resolve()


class TestKeepsThePast(AttentionSuite):
    plugin = attentions.PLUGINS[attentions.KeepsThePast]
    reference = staticmethod(plain)


class TestGroupedQuery(AttentionSuite):
    plugin = GroupedQuery
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}

    @staticmethod
    def reference(weights: Mapping[str, Tensor], x_SD: Tensor, positions_S: Tensor) -> Tensor:
        q, k, v = (projected(weights, f"{name}_proj", x_SD).unflatten(1, (-1, 8)) for name in "qkv")
        q, k = norm(q, weights["q_norm.weight"]), norm(k, weights["k_norm.weight"])
        q, k, v = rope(q, positions_S), rope(k, positions_S).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return projected(weights, "o_proj", softmax(q, k, v, 8**-0.5, seen(len(x_SD)), None))


class TestSinksAndWindows(AttentionSuite):
    plugin = GroupedQuery
    options = {
        **{"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "qk_norm": "all", "clip": 2.0},
        **{"window": 3, "sinks": True, "qkv_bias": True, "out_bias": True},
    }

    @staticmethod
    def reference(weights: Mapping[str, Tensor], x_SD: Tensor, positions_S: Tensor) -> Tensor:
        q, k, v = (projected(weights, f"{name}_proj", x_SD) for name in "qkv")
        q, k = norm(q, weights["q_norm.weight"]), norm(k, weights["k_norm.weight"])
        q, k, v = (each.clamp(-2.0, 2.0).unflatten(1, (-1, 8)) for each in (q, k, v))
        q, k, v = rope(q, positions_S), rope(k, positions_S).repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        rows = softmax(q, k, v, 8**-0.5, seen(len(x_SD), 3), weights["sinks.weight"])
        return projected(weights, "o_proj", rows)


class TestLatent(AttentionSuite):
    plugin = Latent
    options = {
        **{"num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5},
        **{"in_bias": True, "out_bias": True},
    }

    @staticmethod
    def reference(weights: Mapping[str, Tensor], x_SD: Tensor, positions_S: Tensor) -> Tensor:
        q_latent = norm(projected(weights, "q_a_proj", x_SD), weights["q_a_norm.weight"])
        q_nope, q_rope = projected(weights, "q_b_proj", q_latent).unflatten(1, (4, 10)).split([6, 4], -1)
        kv_latent, k_rope = projected(weights, "kv_a_proj", x_SD).split([12, 4], -1)
        kv = projected(weights, "kv_b_proj", norm(kv_latent, weights["kv_a_norm.weight"]))
        k_nope, v = kv.unflatten(1, (4, 11)).split([6, 5], -1)
        k_rope = rope(k_rope.unsqueeze(1), positions_S, neighbours=True).expand(-1, 4, -1)
        q = torch.cat([q_nope, rope(q_rope, positions_S, neighbours=True)], -1)
        rows = softmax(q, torch.cat([k_nope, k_rope], -1), v, 10**-0.5, seen(len(x_SD)), None)
        return projected(weights, "o_proj", rows)
