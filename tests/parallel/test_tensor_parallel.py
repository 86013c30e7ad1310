"""Results split over tp equal those of one rank: vocabulary, logits, and the draws and balance of routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moefw.core.stages import Batch
from moefw.models.embedding import Embedding, cross_entropy
from moefw.runtime.parallel.meshes import Mesh, MeshPlan
from moefw.runtime.parallel.opened_layout import OpenedLayout
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import open_model, whole_model
from moefw.testing.training import SMALL, short_run

VOCAB, DIM = 12, 6


def split_over(size: int) -> TensorParallel:
    ones = [("pp", 1), ("dp", 1), ("cp", 1)]
    experts = Mesh((("pp", 1), ("edp", size), ("ep", 1), ("etp", 1)))
    return TensorParallel(OpenedLayout(MeshPlan(dense=Mesh((*ones, ("tp", size))), experts=experts), "cpu"))


def embed_and_lose(size: int, scale: float) -> dict[str, torch.Tensor]:
    """Return this rank's loss, embeddings and gradients of a table that is both embedding and head."""
    tp = split_over(size)
    generator = torch.Generator().manual_seed(0)
    table, ids_T = torch.randn(VOCAB, DIM, generator=generator), torch.randint(VOCAB, (20,), generator=generator)
    labels_T = torch.randint(VOCAB, (20,), generator=generator)
    labels_T[::3] = -100
    embedding = Embedding(VOCAB, DIM, tp)
    shard = tp.shard(0)
    embedding.weight.data.copy_(shard.of(table) if shard else table)
    x_tD = embedding(ids_T)
    logits_Tv = tp.gather(x_tD) @ embedding.weight.T * scale
    loss = cross_entropy(logits_Tv, labels_T, tp).sum()
    loss.backward()
    assert embedding.weight.grad is not None
    return {"x": x_tD.detach(), "loss": loss.detach(), "grad": embedding.weight.grad}


@pytest.mark.parametrize("scale", [1.0, 80.0])
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_vocabulary_embeds_loses_and_learns_like_a_whole_one(pool: RankPool, size: int, scale: float) -> None:
    """Logits of several hundred overflow an exponential that is not shifted by the largest logit of all ranks."""
    (alone,) = pool.run(embed_and_lose, 1, 1, scale)
    ranks = pool.run(embed_and_lose, size, size, scale)
    assert torch.equal(torch.cat([rank["x"] for rank in ranks]), alone["x"])
    torch.testing.assert_close(sum(rank["loss"] for rank in ranks), alone["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([rank["grad"] for rank in ranks]), alone["grad"], rtol=1e-5, atol=1e-5)


def test_the_loss_of_a_rank_is_that_of_its_tokens(pool: RankPool) -> None:
    logits, labels = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    losses = pool.run(lose_own, 2, logits, labels)
    each = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(torch.stack(losses), torch.stack([each[:4].sum(), each[4:].sum()]))


def lose_own(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    tp = split_over(2)
    return cross_entropy(logits.chunk(2, 1)[tp.index], labels, tp).sum()


def logits_of(parallel: dict[str, Any], world: int, length: int) -> torch.Tensor:
    layer_case = whole_model(world, parts={"parallel": parallel}, plugins=(), sizes={"vocab_size": 64})
    model, *_ = open_model(layer_case)
    ids = torch.arange(2 * length).view(2, length) % 64
    with torch.no_grad():
        return model.logits(Batch(ids_BS=ids, labels_BS=ids))[0]


@pytest.mark.parametrize("length", [1, 5])
def test_logits_are_whole_for_any_length(pool: RankPool, length: int) -> None:
    (alone,) = pool.run(logits_of, 1, {}, 1, length)
    layout = {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
    for rank in pool.run(logits_of, 4, layout, 4, length):
        torch.testing.assert_close(rank, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(6, 2), (12, 4), *(pytest.param(*some, marks=pytest.mark.deep) for some in ((6, 3), (6, 1), (9, 9)))],
)
def test_heads_may_share_keys_in_any_way(pool: RankPool, heads: int, kv_heads: int) -> None:
    """Over three ranks: whole groups a rank, one group over ranks, and groups that end within a rank."""
    sizes = {"vocab_size": 63, "dense_dim": 48, "shared_expert_dim": 24}
    tree = {**SMALL, "model": {**SMALL["model"], **sizes}, "train": {**SMALL["train"], "seq_len": 24}}
    tree["attention"] = {**SMALL["attention"], "num_heads": heads, "num_kv_heads": kv_heads}
    tree["train"]["tokens_per_step"] = 96
    (alone,) = pool.run(short_run, 1, {**tree, "parallel": {}}, 2)
    runs = pool.run(short_run, 3, {**tree, "parallel": {"dense": {"tp": 3}}}, 2)
    assert [one.loss for one in runs[0].results] == pytest.approx([one.loss for one in alone.results], rel=1e-6)
    assert runs[0].results[0].grad_norm == pytest.approx(alone.results[0].grad_norm, rel=1e-6)
    assert runs[0].results[0].grad_norms == pytest.approx(alone.results[0].grad_norms, rel=5e-6)
    assert runs[0].results[0].router_entropy_L == pytest.approx(alone.results[0].router_entropy_L, rel=1e-6)


BALANCE = [{"kind": "aux_loss", "over": "sequence"}, {"kind": "aux_loss", "over": "micro_batch"}, {"kind": "z_loss"}]


def test_routers_draw_and_balance_over_sequences_that_lie_on_several_ranks(pool: RankPool) -> None:
    """Three ranks of tp share two sequences of a micro-batch, so one rank has tokens of both."""
    sizes = {"vocab_size": 66, "dense_dim": 66, "shared_expert_dim": 24}
    tree = {
        **SMALL,
        "model": {**SMALL["model"], **sizes},
        "attention": {**SMALL["attention"], "num_heads": 6},
        "routing": {"use": "topk", "score": "sigmoid", "jitter": 0.1, "balance": BALANCE},
        "train": {**SMALL["train"], "seq_len": 24, "tokens_per_step": 96},
    }
    (alone,) = pool.run(short_run, 1, {**tree, "parallel": {}}, 3, True)
    runs = pool.run(short_run, 3, {**tree, "parallel": {"dense": {"tp": 3}}}, 3, True)
    for got, wanted in zip(runs[0].results, alone.results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert got.aux_losses == pytest.approx(wanted.aux_losses, rel=1e-5)
