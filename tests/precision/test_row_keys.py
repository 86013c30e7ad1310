"""Keys of rows depend only on (sequence seed, position, expert), for every dispatcher and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import nvfp4_oracle as oracle
from dispatchers import DISPATCHERS
from moefw.core.stages import ExpertBatch
from moefw.runtime.compute.row_keys import keyed
from moefw.testing.layer_case import LayerCase, this_rank
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from pairwise import each_value
from quantized_oracle import FORMATS

WORLDS: dict[str, tuple[int, Any]] = {
    "one rank": (1, {}),
    "ep 2": (2, {"experts": {"ep": 2}}),
    "ep 4 over two nodes": (4, {"experts": {"ep": 4}, "ranks_per_node": 2}),
    "ep 2, etp 2": (4, {"experts": {"ep": 2, "etp": 2}, "ranks_per_node": 2}),
    "ep 2, edp 2": (4, {"experts": {"ep": 2}}),
    "tp 2, ep 4": (4, {"dense": {"tp": 2}, "experts": {"ep": 4}}),
}
LAYER = 1


@dataclass
class Seen:
    """Observations of one rank in a layer: its tokens' keys and choices; keys by expert, and those of padding."""

    group: tuple[int, ...]
    keys_T: oracle.Words
    ids_TK: np.ndarray[Any, Any]
    by_expert: dict[int, list[int]]
    of_padding: list[int]


def model_of(world: int, parallel: Any, dispatch: Any, **parts: Any) -> LayerCase:
    return whole_model(
        world,
        sizes={"vocab_size": 64},
        parts={"precision": FORMATS["nvfp4"].choice, "dispatch": dispatch, "parallel": parallel, **parts},
        plugins=(),
    )


def seen_by_rank(layer_case: LayerCase) -> Seen:
    """Run a model on two micro-batches; observe the last."""
    model, assembly, layout, shared = open_model(layer_case)
    got: list[ExpertBatch] = []
    moe: Any = model.layers[LAYER].moe
    moe._experts = lambda batch: got.append(batch) or batch.rows_RD
    batches = global_batch(assembly, layout, 3)[:2]
    for batch in batches:
        output = model(batch)
    shared.close()
    seeds, positions = batches[-1].seeds_B, batches[-1].ids_BS.shape[1]
    keys_T = np.concatenate([oracle.keys_of_tokens(int(seed), positions) for seed in seeds])
    keys_T = np.array_split(keys_T, layout.size("tp"))[layout.index("tp")]
    arrived, by_expert, padding, start = got[-1], {}, [], 0
    assert arrived.keys_R is not None
    keys_R = arrived.keys_R.tolist()
    for expert, count, end in zip(moe.experts.numbers, arrived.counts_e.tolist(), arrived.offsets_e.tolist()):
        by_expert[expert] = keys_R[start : start + count]
        padding += keys_R[start + count : end]
        start = end
    group = layout.plan.group(this_rank(), ("ep", "etp"))
    return Seen(group, keys_T, output.layers[LAYER].expert_ids_TK.numpy(), by_expert, padding)


@pytest.mark.parametrize(("world", "dispatch"), each_value(WORLDS, DISPATCHERS))
def test_each_row_has_the_key_of_its_token_and_expert(pool: RankPool, dispatch: str, world: str) -> None:
    """Rows are in order of (source rank, token) within an expert; padding has no keys."""
    ranks, parallel = WORLDS[world]
    found = pool.run(seen_by_rank, ranks, model_of(ranks, parallel, DISPATCHERS[dispatch]))
    for one in found:
        sources = [found[rank] for rank in one.group]
        for expert, keys in one.by_expert.items():
            rows = [source.keys_T[(source.ids_TK == expert).any(1)] for source in sources]
            wanted = oracle.keys_of_rows(np.concatenate(rows), expert)
            assert keys == wanted.view(np.int64).tolist()
        assert one.of_padding
        assert not any(one.of_padding)
    assert sum(len(keys) for one in found for keys in one.by_expert.values()) > 0


def test_tokens_of_sequences_without_seeds_have_no_keys() -> None:
    """In evaluation nothing is drawn, and no key travels."""
    layer_case = model_of(1, {}, {"use": "alltoall"})
    model, assembly, layout, shared = open_model(layer_case)
    (batch, *_) = global_batch(assembly, layout, 0)
    assert keyed(batch).keys_T is not None
    plain = type(batch)(ids_BS=batch.ids_BS, labels_BS=batch.labels_BS)
    assert keyed(plain) is plain
    moe: Any = model.layers[LAYER].moe
    got: list[ExpertBatch] = []
    moe._experts = lambda batch: got.append(batch) or batch.rows_RD
    model(plain)
    shared.close()
    assert got[0].keys_R is None


@pytest.mark.parametrize(
    ("precision", "travels"),
    [
        (FORMATS["nvfp4"].choice, True),
        ({**FORMATS["nvfp4"].choice, "stochastic_rounding": False}, False),
        ({**FORMATS["nvfp4"].choice, "keep_bf16": [f"layers.{LAYER}.moe.experts"]}, False),
        (FORMATS["mxfp8"].choice, False),
    ],
    ids=str,
)
def test_keys_travel_only_where_experts_draw(precision: Any, travels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, assembly, layout, shared = open_model(model_of(1, {}, {"use": "alltoall"}, precision=precision))
    moe: Any = model.layers[LAYER].moe
    sent: list[Any] = []
    redispatch = moe.dispatcher.start_redispatch
    monkeypatch.setattr(moe.dispatcher, "start_redispatch", lambda *given: sent.append(given) or redispatch(*given))
    batch = keyed(global_batch(assembly, layout, 0)[0])
    moe(torch.randn(batch.ids_BS.numel(), assembly.site.dims.model_dim).bfloat16(), batch)
    shared.close()
    assert bool(sent) == travels
