"""``alltoall`` within a static budget: equal to the oracle, and the same operators whatever the routing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefw.core.errors import MoefwError
from moefw.testing.given_routing import RowBudget, over_budget
from moefw.testing.host_waits import HostWaits, available
from moefw.testing.layer_case import LayerCase, assert_matches, build_layer, received, solve, this_rank, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from operators_seen import Operators
from pairwise import pairwise

WORLDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one rank": ((9,), {}),
    "two ranks": ((6, 4), {"experts": {"ep": 2}}),
    "one of four is empty": ((6, 0, 5, 3), {"experts": {"ep": 4}}),
    "experts in halves": ((6, 1, 5, 3), {"experts": {"ep": 2, "etp": 2}}),
    "all experts in halves": ((4, 3), {"experts": {"etp": 2}}),
}
ENOUGH = 16.0


def case_of(world: str, rank_capacity: float, *, max_tokens: int | None = None, **more: Any) -> LayerCase:
    tokens, parallel = WORLDS[world]
    dispatch = {"use": "alltoall", "rank_capacity": rank_capacity, "on_overflow": "rerun", "max_tokens": max_tokens}
    parts = {"dispatch": dispatch, "parallel": parallel, "routing": {"use": "topk", "score": "sigmoid"}}
    return LayerCase(**{"tokens": tokens, "skew": "one", **more, "parts": {**parts, **more.get("parts", {})}})


@pytest.mark.parametrize(("world", "alignment", "gemm"), pairwise(WORLDS, [1, 4], ["loop", "grouped"]))
def test_a_budget_with_room_for_all_rows_changes_nothing(pool: RankPool, world: str, alignment: int, gemm: str) -> None:
    case = case_of(world, ENOUGH, row_alignment=alignment, masked=True, parts={"gemm": {"use": gemm}})
    assert_matches(pool.run(solve, case.world, case), truth(case, Rule(top_k=case.top_k)), rtol=1e-5)
    larger = case_of(world, ENOUGH, max_tokens=11, row_alignment=alignment, masked=True, parts={"gemm": {"use": gemm}})
    assert_matches(pool.run(solve, case.world, larger), truth(case, Rule(top_k=case.top_k)), rtol=1e-5)


@pytest.mark.parametrize(
    ("world", "alignment", "gemm", "budget"),
    pairwise(WORLDS, [1, 4], ["loop", "grouped"], [(0.6, None), (1.0, None), (1.2, 7)]),
)
def test_rows_beyond_the_budget_are_those_that_a_brute_force_leaves_out(
    pool: RankPool, world: str, alignment: int, gemm: str, budget: tuple[float, int | None]
) -> None:
    capacity, max_tokens = budget
    tokens = tuple(min(each, max_tokens or each) for each in WORLDS[world][0])
    parts = {"gemm": {"use": gemm}}
    case = case_of(world, capacity, max_tokens=max_tokens, row_alignment=alignment, tokens=tokens, parts=parts)
    rule, most = Rule(top_k=case.top_k), max_tokens or max(tokens)
    ids = truth(case, rule).expert_ids_TK.split(list(tokens))
    sizes = case.parts["parallel"].get("experts", {})
    ep, etp = sizes.get("ep", 1), sizes.get("etp", 1)
    about: dict[str, Any] = {
        "num_experts": case.num_experts,
        "ep": ep,
        "row_alignment": alignment,
        "max_tokens": max_tokens,
    }
    masks = over_budget(ids, budget=RowBudget(capacity, by_source=True), **about)
    assert_matches(pool.run(solve, case.world, case), truth(case, rule, dropped_TK=torch.cat(masks)), rtol=1e-5)
    batches = pool.run(received, case.world, case)
    said = sum(batch.stats["overflow"].item() for batch in batches) / etp
    assert said == sum(int(mask_TK.sum()) for mask_TK in masks)
    assert said > 0 or capacity >= 1, "the case is to overflow"
    rows = math.ceil(math.ceil(capacity * most * case.top_k * etp) / alignment) * alignment
    assert {len(batch.rows_RD) for batch in batches} == {rows}


def dropless(layer_case: LayerCase) -> Tensor:
    """Return the output of this rank in a step that is run again."""
    layer, shared = build_layer(layer_case)
    out_TD, stats = layer(layer_case.draw(this_rank())[0], replace(layer_case.batch(this_rank()), dropless=True))
    shared.close()
    assert "overflow" not in stats.stats
    return out_TD.detach()


@pytest.mark.parametrize("world", WORLDS)
def test_a_second_run_drops_nothing(pool: RankPool, world: str) -> None:
    case = case_of(world, 0.3)
    wanted = truth(case, Rule(top_k=case.top_k)).out_TD
    torch.testing.assert_close(torch.cat(pool.run(dropless, case.world, case)).double(), wanted, rtol=1e-4, atol=1e-5)


def refusal(world: str = "two ranks", **options: Any) -> str:
    tokens, parallel = WORLDS[world]
    parts = {"dispatch": {"use": "alltoall", **options}, "parallel": parallel}
    with pytest.raises(MoefwError) as caught:
        LayerCase(tokens=tokens, parts=parts).assemble()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank_capacity": 1.5}, "Set on_overflow"),
        ({"on_overflow": "rerun"}, "no budget"),
        ({"rank_capacity": 0.0, "on_overflow": "rerun"}, "rank_capacity"),
        ({"rank_capacity": 1.0, "on_overflow": "drop"}, "'drop'"),
        ({"max_tokens": 5}, "without rank_capacity there is none"),
    ],
)
def test_options_that_make_no_budget_are_refused(options: dict[str, object], words: str) -> None:
    assert words in refusal(**options)


def test_more_tokens_than_max_tokens_are_refused() -> None:
    with pytest.raises(MoefwError, match="a rank sends 9 tokens; max_tokens is 8"):
        solve(case_of("one rank", 2.0, max_tokens=8))


def operators(layer_case: LayerCase) -> tuple[list[str], float, Tensor]:
    """Return the operators of a layer, forward and backward, the rows that found no room, and the experts' loads."""
    layer, shared = build_layer(layer_case)
    with HostWaits() as waits:
        waits.move(layer)
        x_TD, probe_TD = waits.on_device(layer_case.draw(this_rank()))
        x_TD.requires_grad_()
        batch = waits.on_device(layer_case.batch(this_rank()))
        with Operators() as noted:
            out_TD, stats = layer(x_TD, batch)
            (out_TD * probe_TD).sum(dtype=torch.float32).backward()
        assert [*waits.reads, *waits.uploads] == []
        found = waits.on_host(dict(stats.stats))
    shared.close()
    return noted.seen, found["overflow"].item(), found["tokens_per_expert"]


@pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")
@pytest.mark.parametrize(
    ("world", "alignment", "capacity"),
    [("one rank", 4, 1.15), ("two ranks", 1, 1.6), ("two ranks", 4, 1.6), ("experts in halves", 1, 1.6)],
)
def test_a_whole_layer_runs_the_same_operators_on_the_same_shapes_whatever_the_routing(
    own_pool: RankPool, world: str, alignment: int, capacity: float
) -> None:
    """From the router to combine and back, on a device that runs ahead, and of which the host reads nothing.

    Grouped products in bf16 are one operator there, which reads on the device where groups end.
    """
    more: dict[str, Any] = {"tokens": (16,) * len(WORLDS[world][0]), "dim": 16, "num_experts": 8, "shared": True}
    more |= {"row_alignment": alignment, "parts": {"precision": {"use": "bf16"}, "gemm": {"use": "grouped"}}}
    runs, overflows, largest = [], [], []
    for skew, seed in (("even", 0), ("starved", 1), ("one", 2), ("one", 3)):
        case = case_of(world, capacity, max_tokens=16, skew=skew, seed=seed, **more)
        seen, overflow, loads = zip(*own_pool.run(operators, case.world, case), strict=True)
        runs.append(seen)
        overflows.append(sum(overflow))
        load_E = torch.stack(loads).sum(0)
        largest.append((load_E.max() / load_E.mean()).item())
    assert any(load == 4.0 and not over for load, over in zip(largest, overflows)), "every token goes to one expert"
    assert min(largest) < 3.0, "experts are more alike"
    assert any(overflows), "rows find no room"
    assert all(len(seen) > 50 for seen in runs[0])
    assert all(run == runs[0] for run in runs)
