"""Routers in a training run: per-token computation is the same in every layout and every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run

TOKENWISE: dict[str, dict[str, Any]] = {
    "global batch": {"balance": [{"kind": "aux_loss", "coeff": 0.5, "over": "global_batch"}, {"kind": "z_loss"}]},
    "sequences": {"balance": [{"kind": "aux_loss", "coeff": 0.5, "over": "sequence"}]},
    "bias and groups": {
        "score": "sqrtsoftplus",
        "balance": [{"kind": "expert_bias"}],
        "groups": {"count": 4, "keep": 2},
    },
    "jitter": {"score": "sigmoid", "jitter": 0.3},
    "fp64": {"pre_softmax": True, "dtype": "fp64"},
}
LOOKING_AROUND: dict[str, dict[str, Any]] = {
    "quantile": {"balance": [{"kind": "quantile"}]},
    "capacity": {"capacity": {"factor": 0.8}, "balance": [{"kind": "aux_loss"}]},
    "sinkhorn": {"use": "sinkhorn", "z_loss": 0.01},
    "forced": {"use": "forced"},
}


def run(pool: RankPool, world: int, routing: dict[str, Any], micro_batch: int, regions: tuple[str, ...] = ()) -> Run:
    tree = {
        **SMALL,
        "routing": {"use": "topk", **routing},
        "train": {**SMALL["train"], "micro_batch": micro_batch},
        "parallel": {"experts": {"ep": world}},
        "memory": [{"use": "recompute", "regions": list(regions)}] if regions else [],
    }
    return pool.run(short_run, world, tree, 3)[0]


@pytest.mark.parametrize("name", TOKENWISE)
def test_no_layout_and_no_split_changes_a_step(pool: RankPool, name: str) -> None:
    wanted = run(pool, 1, TOKENWISE[name], micro_batch=8)
    got = run(pool, 2, TOKENWISE[name], micro_batch=2, regions=("router",))
    for one, other in zip(got.results, wanted.results, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.aux_losses == pytest.approx(other.aux_losses, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        torch.testing.assert_close(torch.tensor(one.load_LE), torch.tensor(other.load_LE))
    assert got.state.keys() == wanted.state.keys()
    for key, tensor in got.state.items():
        torch.testing.assert_close(tensor, wanted.state[key], rtol=1e-5, atol=1e-6)
    assert bool(got.state) == (name in ("global batch", "bias and groups"))


@pytest.mark.parametrize("name", LOOKING_AROUND)
def test_routers_that_look_at_the_micro_batch_train_and_recompute_to_the_same_bits(pool: RankPool, name: str) -> None:
    kept = run(pool, 2, LOOKING_AROUND[name], micro_batch=4)
    again = run(pool, 2, LOOKING_AROUND[name], micro_batch=4, regions=("layer",))
    assert [result.loss for result in kept.results] == [result.loss for result in again.results]
    assert all(torch.equal(kept.last[key], again.last[key]) for key in kept.last)
    assert all(torch.equal(kept.state[key], again.state[key]) for key in kept.state)
    moved = [key for key in kept.last if key.endswith("router.weight")]
    assert all(not torch.equal(kept.first[key], kept.last[key]) for key in moved)
    assert bool(kept.state) == (name == "quantile")
    loads = [load for result in kept.results for load in result.load_LE]
    if name == "forced":
        assert loads == [[1.0] * 8] * len(loads)
    if name == "capacity":
        assert all(result.counts["dropped_choices"] > 0 for result in kept.results)
