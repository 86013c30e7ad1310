"""Documents of mixed length in packs train as on one rank, however many ranks share each pack.

Some ranks have empty packs meanwhile: all ranks of an expert group make equally many calls of each MoE layer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from moefw import Batch
from moefw.compose.build import open_layout
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from packed_text import read_packs
from pairwise import deep
from resolved_specs import resolved

GQA = {"use": "gqa", "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
MLA = {"use": "mla", "num_heads": 4, "q_rank": 10, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "v_dim": 5}
SINKS = GQA | {"sinks": True, "window": 9, "full_layers": [1]}
TWO = {"dense": {"cp": 2}, "experts": {"ep": 2}}
ACROSS = {"dense": {"cp": 2}, "experts": {"ep": 4}}
HEADS = {"dense": {"cp": 2, "tp": 2}, "experts": {"ep": 2, "etp": 2}}
SHARDED = {"dense": {"cp": 4, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
STEPS = 2


def tree(tokens_per_step: int = 256, **parts: Any) -> dict[str, Any]:
    model = {**SMALL["model"], "vocab_size": 64, "init_std": 0.1, "mtp_layers": 1, "num_layers": 2}
    train = {
        **SMALL["train"],
        "seq_len": 32,
        "micro_batch": 1,
        "tokens_per_step": tokens_per_step,
        "packing": "dynamic",
    }
    return {**SMALL, "model": model, "attention": GQA, "train": train, **parts}


def run(pool: RankPool, world: int, spec: dict[str, Any]) -> list[Run]:
    return pool.run(short_run, world, spec, STEPS, False, False, read_packs)


def compare(pool: RankPool, world: int, spec: dict[str, Any], **shared: Any) -> None:
    (alone,), (found, *_) = run(pool, 1, spec), run(pool, world, {**spec, **shared})
    for one, wanted in zip(found.results, alone.results, strict=True):
        assert one.tokens == wanted.tokens
        assert one.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert one.aux_losses == pytest.approx(wanted.aux_losses, rel=2e-6)
        assert one.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)
        assert (one.largest_logit or 0.0) == pytest.approx(wanted.largest_logit or 0.0, rel=1e-5)
        assert one.load_LE == wanted.load_LE
    for name, weight in found.last.items():
        assert (weight - alone.last[name]).norm() <= 1e-4 * alone.last[name].norm(), name


@pytest.mark.parametrize(
    ("algorithm", "world", "parallel", "attention"),
    [
        pytest.param("allgather_kv", 4, SHARDED, SINKS, marks=pytest.mark.deep),
        ("ring_attention", 2, TWO, MLA),
        ("ulysses", 4, HEADS, GQA),
        pytest.param("ring_attention", 4, ACROSS, GQA, marks=pytest.mark.deep),
    ],
    ids=["sinks, windows and FSDP", "latents on a ring", "heads and parts of experts", "experts across dp and cp"],
)
def test_each_pack_has_its_own_number_of_ranks(
    pool: RankPool, algorithm: str, world: int, parallel: dict[str, Any], attention: dict[str, Any]
) -> None:
    spec = tree(96, attention=attention)
    compare(pool, world, spec, parallel=parallel, context_parallel={"use": algorithm})


def test_all_ranks_share_each_pack(pool: RankPool) -> None:
    spec = tree(attention=SINKS, train={**tree()["train"], "packing": "static"})
    compare(pool, 2, spec, parallel=TWO, context_parallel={"use": "allgather_kv"})


@pytest.mark.parametrize("packing", ["dynamic", *deep("static")])
def test_logits_of_packs_are_clipped_alike(pool: RankPool, packing: str) -> None:
    optimizer = {"use": "muon", "newton_schulz": "fp32", "adamw_eps": 1e-6, "qk_clip": 0.05}
    train = {**tree(96)["train"], "packing": packing, "optimizer": optimizer}
    compare(pool, 2, tree(attention=MLA, train=train), parallel=TWO, context_parallel={"use": "ring_attention"})


def test_losses_of_sequences_and_random_draws_are_those_of_each_document(pool: RankPool) -> None:
    balance = [{"kind": "aux_loss", "over": level} for level in ("sequence", "global_batch")]
    routing = {"use": "topk", "jitter": 0.1, "balance": [*balance, {"kind": "z_loss"}]}
    compare(pool, 2, tree(routing=routing), parallel=TWO)


@pytest.mark.parametrize("dispatch", ["alltoall", "hybridep", *deep("allgather", "deepep")])
def test_every_dispatcher_moves_rows_of_some_ranks_and_none_of_others(pool: RankPool, dispatch: str) -> None:
    backend = {"backend": "torch"} if dispatch in ("deepep", "hybridep") else {}
    compare(pool, 4, tree(64, dispatch={"use": dispatch, **backend}), parallel=ACROSS)


@pytest.mark.parametrize(
    "memory",
    [
        *deep([{"use": "recompute", "regions": ["layer"]}]),
        [{"use": "recompute", "regions": ["core_attn", "moe_act"]}, {"use": "offload", "regions": ["qkv"]}],
    ],
    ids=["layers again", "regions again, or on the host"],
)
def test_memory_policies_hold_packs_of_any_length(pool: RankPool, memory: list[dict[str, Any]]) -> None:
    compare(pool, 2, tree(), parallel=TWO, memory=memory)


def test_an_even_load_is_not_known_beforehand_where_ranks_have_unequal_packs(pool: RankPool) -> None:
    spec = tree(64, routing={"use": "forced"}, parallel=ACROSS)
    for one in run(pool, 4, spec)[0].results:
        assert one.loss > 0.0
        assert {len(load) for load in one.load_LE} == {SMALL["model"]["num_experts"]}


def test_a_budget_and_pages_are_exceeded_and_the_step_run_again(pool: RankPool) -> None:
    dispatch = {"use": "hybridep", "backend": "torch", "rank_capacity": 0.6, "on_overflow": "rerun"}
    pages = [{"use": "paged-stash", "regions": ["experts"], "factor": 0.3, "page_rows": 2, "spill": "host"}]
    compare(pool, 4, tree(64), parallel=ACROSS, dispatch=dispatch, memory=pages)


@pytest.mark.parametrize("recipe", ["fp8-tensor", *deep("fp8-blockwise", "nvfp4")])
def test_recipes_quantize_packs_of_any_length(pool: RankPool, recipe: str) -> None:
    spec = tree(64, precision={"use": recipe, "backend": "emulate"})
    spec["model"] |= {"mtp_layers": 0}
    (alone,), (found, _) = run(pool, 1, spec), run(pool, 2, {**spec, "parallel": TWO})
    for one, wanted in zip(found.results, alone.results, strict=True):
        assert one.loss == pytest.approx(wanted.loss, rel=1e-2)


def shapes(spec: dict[str, Any]) -> list[list[tuple[int, int | None]]]:
    """Return tokens and ranks of this rank's packs."""
    assembly = resolved(json.dumps(spec), world=4, for_run=False)
    read = read_packs(assembly, open_layout(assembly, "cpu"))

    def of(batch: Batch) -> tuple[int, int | None]:
        return batch.ids_BS.numel(), batch.cp

    return [[of(batch) for batch in read(step)] for step in range(6)]


def test_ranks_have_equally_many_packs_of_which_some_are_empty(pool: RankPool) -> None:
    ranks = pool.run(shapes, 4, tree(64, parallel={"dense": {"cp": 4}}))
    for packs in zip(*ranks, strict=True):
        assert len({len(own) for own in packs}) == 1
    held = {pack for rank in ranks for step in rank for pack in step}
    assert {cp for _, cp in held} == {1, 2, 4}
    assert (0, 1) in held
    assert max(tokens / (cp or 1) for tokens, cp in held) <= 32 / 4
