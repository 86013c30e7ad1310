"""Memory that sharding keeps on a rank, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefw.core.stages import Batch
from moefw.runtime.naming import by_parameter
from moefw.runtime.parallel.local_shards import all_of, local, whole
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL, short_run
from pairwise import deep

TREE = {
    **SMALL,
    "model": {**SMALL["model"], "vocab_size": 64, "num_layers": 2},
    "train": {**SMALL["train"], "tokens_per_step": 128},
}
ALL = {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}


def opened(precision: str) -> Any:
    parts = {"parallel": ALL, "precision": {"use": precision}}
    return open_model(whole_model(4, parts=parts, plugins=(), sizes={"vocab_size": 64}))


def shares() -> tuple[int, int, set[str]]:
    """Return the elements that this rank stores, the elements of the model, and the parameters that are not sharded."""
    model, *_ = opened("fp32")
    parameters = list(model.named_parameters())
    stored = sum(local(parameter).numel() for _, parameter in parameters)
    return stored, sum(p.numel() for _, p in parameters), {n for n, p in parameters if not isinstance(p, DTensor)}


def test_each_rank_stores_its_share_of_every_parameter(pool: RankPool) -> None:
    """Experts are on two expert-parallel ranks with two copies each; other parameters have four copies."""
    for stored, everything, apart in pool.run(shares, 4):
        assert not apart
        assert 0.25 < stored / everything < 0.5


def kept_weights(precision: str) -> list[str]:
    """Return the weights that stay allocated, in any dtype, between forward and backward."""
    model, *_ = opened(precision)
    shapes = {tuple(parameter.shape): name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    saved: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    ids_BS = torch.arange(18).view(2, 9)  # no weight has a side of 18
    batch = Batch(ids_BS=ids_BS, labels_BS=ids_BS)
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        loss = model(batch).loss_sum
    there = [tensor for tensor in saved if tensor.untyped_storage().size()]
    found = [shapes[side] for tensor in there for side in (tensor.shape, tensor.shape[::-1]) if side in shapes]
    loss.backward()
    return found


@pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch crashes when a hook looks at parameters of FSDP2")
@pytest.mark.parametrize("precision", [*deep("fp32"), "bf16"])
def test_no_weight_stays_gathered_until_backward(pool: RankPool, precision: str) -> None:
    for found in pool.run(kept_weights, 4, precision):
        assert not [name for name in found if "router" not in name]


def test_sharded_bf16_learns_like_whole_bf16(pool: RankPool) -> None:
    tree = {**TREE, "precision": {"use": "bf16"}}
    copies = pool.run(short_run, 4, {**tree, "parallel": {"experts": {"ep": 2}}}, 4)
    shared = pool.run(short_run, 4, {**tree, "parallel": ALL}, 4)
    for got, wanted in zip(shared[0].results, copies[0].results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-4)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)


@pytest.mark.parametrize(
    "regions", [*deep(["layer"]), ["attention", "router", "experts", "shared_experts", "dense_mlp"]]
)
def test_recompute_gathers_again_and_changes_no_bit(pool: RankPool, regions: list[str]) -> None:
    tree = {**TREE, "parallel": ALL}
    plain = pool.run(short_run, 4, tree, 2)
    again = pool.run(short_run, 4, {**tree, "memory": [{"use": "recompute", "regions": regions}]}, 2)
    assert [one.loss for one in again[0].results] == [one.loss for one in plain[0].results]
    assert all(torch.equal(again[0].last[name], plain[0].last[name]) for name in plain[0].last)


def written_and_read() -> bool:
    """Write every parameter whole, read it back whole; both pieces of a stacked one go to their places."""
    model, *_ = opened("fp32")
    for parameter, pieces in by_parameter(model):
        with torch.no_grad(), all_of(parameter) as values:
            for number, piece in enumerate(pieces):
                piece.of(values).fill_(float(number))
        back = whole(parameter.detach())
        for number, piece in enumerate(pieces):
            if not bool((piece.of(back) == number).all()):
                return False
    return True


def test_what_is_written_whole_is_read_whole(pool: RankPool) -> None:
    assert all(pool.run(written_and_read, 4))


def stays_sharded() -> bool:
    """After evaluation, which has no backward, every parameter is the stored piece again."""
    model, assembly, layout, _ = opened("fp32")
    (batch, *_) = global_batch(assembly, layout, 0)
    with torch.no_grad():
        model(batch)
    assert isinstance(model, FSDPModule)
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_evaluation_leaves_nothing_gathered(pool: RankPool) -> None:
    assert all(pool.run(stays_sharded, 4))
