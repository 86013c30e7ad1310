"""A whole MoE layer on two ranks equals the oracle, for every kind of routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefw.core.stages import Batch
from moefw.testing.layer_case import LayerCase, assert_matches, build_layer, solve, this_rank, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from pairwise import each_value

AUX = {"kind": "aux_loss", "coeff": 0.2}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pre_softmax": ({"pre_softmax": True, "scale": 1.5}, {"score": "softmax", "pre_softmax": True, "scale": 1.5}),
    "sqrtsoftplus": ({"score": "sqrtsoftplus"}, {"score": "sqrtsoftplus"}),
    "groups": ({"score": "sigmoid", "groups": {"count": 4, "keep": 2}}, {"groups": (4, 2)}),
    "bias, best of groups": (
        {"score": "sigmoid", "bias": True, "groups": {"count": 4, "keep": 1, "best": 1}},
        {"groups": (4, 1), "group_best": 1},
    ),
    "sequences": ({"balance": [{**AUX, "over": "sequence"}]}, {"score": "softmax", "sequence_aux_coeff": 0.2}),
    "global batch": (
        {"score": "sigmoid", "balance": [{**AUX, "over": "global_batch"}, {"kind": "z_loss", "coeff": 0.1}]},
        {"global_aux_coeff": 0.2, "z_coeff": 0.1},
    ),
    "jitter": (
        {"score": "sigmoid", "jitter": 0.4, "balance": [AUX, {"kind": "z_loss", "coeff": 0.1}]},
        {"aux_coeff": 0.2, "z_coeff": 0.1},
    ),
    "fp64": ({"score": "sigmoid", "dtype": "fp64", "balance": [AUX]}, {"aux_coeff": 0.2}),
    "probs": ({"score": "sigmoid", "capacity": {"factor": 0.6}}, {"capacity": (0.6, "probs")}),
    "position": (
        {"capacity": {"factor": 0.6, "drop": "position"}, "balance": [AUX]},
        {"score": "softmax", "capacity": (0.6, "position"), "aux_coeff": 0.2},
    ),
    "padded": ({"score": "sigmoid", "capacity": {"factor": 0.6, "pad": True}}, {"capacity": (0.6, "probs")}),
    "sinkhorn": ({"use": "sinkhorn", "z_loss": 0.1}, {"kind": "sinkhorn", "z_coeff": 0.1}),
    "forced": ({"use": "forced", "known_counts": False}, {"kind": "forced"}),
}
RECOMPUTE = [{"use": "recompute", "regions": ["router"]}]


def case(routing: dict[str, Any], tokens: tuple[int, ...] = (9, 6), memory: Any = (), **more: Any) -> LayerCase:
    parts = {
        "routing": {"use": "topk", **routing},
        "dispatch": {"use": "alltoall"},
        "memory": list(memory),
        "parallel": {"experts": {"ep": len(tokens)}},
    }
    return LayerCase(tokens=tokens, num_experts=8, parts=parts, **more)


@pytest.mark.parametrize(("setting", "skew", "memory"), each_value(SETTINGS, ["even", "one"], [[], RECOMPUTE]))
def test_the_layer_equals_the_oracle(pool: RankPool, setting: str, skew: str, memory: Any) -> None:
    routing, words = SETTINGS[setting]
    for masked, tokens in ((False, (9, 6)), (True, (0, 11))):
        layer_case = case(routing, tokens, memory, skew=skew, masked=masked, shared=True)
        assert_matches(pool.run(solve, 2, layer_case), truth(layer_case, Rule(top_k=2, **words)), rtol=2e-5)


def test_the_quantiles_equal_the_oracle(pool: RankPool) -> None:
    layer_case = case({"balance": [{"kind": "quantile"}]}, masked=True)
    wanted = truth(layer_case, Rule(top_k=2, score="softmax"), beta_E=torch.zeros(8))
    assert_matches(pool.run(solve, 2, layer_case), wanted, rtol=2e-5)


def test_forced_counts_are_not_exchanged_and_right(pool: RankPool) -> None:
    layer_case = case({"use": "forced"}, tokens=(6, 6))
    assert_matches(pool.run(solve, 2, layer_case), truth(layer_case, Rule(kind="forced", top_k=2)), rtol=2e-5)


@pytest.mark.parametrize("setting", ["jitter", "probs", "sequences", "fp64", "sinkhorn"])
def test_recomputing_the_router_changes_no_bit(pool: RankPool, setting: str) -> None:
    kept, again = (pool.run(solve, 2, case(SETTINGS[setting][0], memory=memory)) for memory in ((), RECOMPUTE))
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one.out_TD, other.out_TD)
        for name, grad in {**one.grads, **one.shares}.items():
            assert torch.equal(grad, {**other.grads, **other.shares}[name]), name


def test_choices_dropped_behind_the_router_are_left_out_by_the_oracle(pool: RankPool) -> None:
    """The oracle can drop the choices that a dispatcher's budget drops; here they are given by a replay."""
    layer_case = case({"score": "sigmoid", "renormalise": False})
    free = truth(layer_case, Rule(top_k=2, renormalise=False))
    dropped_TK = torch.zeros(15, 2, dtype=torch.bool)
    dropped_TK[::4, 1] = True
    wanted = truth(layer_case, Rule(top_k=2, renormalise=False), dropped_TK=dropped_TK)
    ids_TK = free.expert_ids_TK.masked_fill(dropped_TK, -1)
    assert torch.equal(wanted.expert_ids_TK, ids_TK)
    out_TD = torch.cat(pool.run(replayed, 2, layer_case, ids_TK.split([9, 6])))
    torch.testing.assert_close(out_TD.double(), wanted.out_TD, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted.out_TD, free.out_TD)


def replayed(layer_case: LayerCase, routes: tuple[Tensor, ...]) -> Tensor:
    layer, shared = build_layer(layer_case)
    x_TD, _ = layer_case.draw(this_rank())
    ids_BS = torch.zeros(1, len(x_TD), dtype=torch.int64)
    out_TD, _ = layer(x_TD, Batch(ids_BS=ids_BS, labels_BS=ids_BS, routes={0: routes[this_rank()]}))
    shared.close()
    return out_TD.detach()
