"""What the planner does not measure twice: the ledger is the same, number for number, as if it did."""

from __future__ import annotations

from typing import Any, Final

import pytest
from attrs import evolve
from torch._subclasses.fake_tensor import FakeTensorMode

from ledger_cases import ATTENTION, BUDGET, MODEL, RUN, TRAIN, assembly_of, offload, recompute
from moefw.planner.measurement.layers import alike_positions
from moefw.planner.measurement.measure import measure, measure_at, recorded
from moefw.planner.measurement.usage import Usage
from moefw.recording.known_results import KnownResults
from pairwise import quick

DEEPER: Final = {**MODEL, "num_layers": 8}
UNEVEN: Final = {**MODEL, "num_layers": 6, "num_dense_layers": 2, "mtp_layers": 1}
STASH: Final = [{"use": "paged-stash", "regions": ["experts"], "page_rows": 8}]


def sharded(zero: int) -> dict[str, Any]:
    return {"pp": 2, "dense": {"shard": "all", "zero": zero}, "experts": {"ep": 2, "shard": "all", "zero": zero}}


SPECS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "uneven stages, dense layers first, a token further ahead": (
        4,
        {"model": UNEVEN, "parallel": {"pp": 4}, "pipeline": {"use": "1f1b", "layout": "Et*3|t|t|tmL"}},
    ),
    "interleaved, recomputed and offloaded": (
        2,
        {
            "parallel": {"pp": 2},
            "pipeline": {"use": "interleaved"},
            "memory": [recompute("mlp_norm", "expert_fc1"), offload("attention")],
        },
    ),
    "interleaved, merged": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "interleaved", "merged": True}}),
    "gpipe": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "gpipe"}}),
    "zero-bubble": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}}),
    "dualpipe-v, merged, recomputed": (
        2,
        {
            "parallel": {"pp": 2},
            "pipeline": {"use": "dualpipe-v", "merged": True},
            "memory": [recompute("attn_norm", "dispatch")],
        },
    ),
    "gathered for each pass": (8, {"parallel": sharded(3)}),
    "gathered for each pass, recomputed": (8, {"parallel": sharded(3), "memory": [recompute("attn_norm", "router")]}),
    "gathered once": (8, {"parallel": sharded(2)}),
    "reduced once, pages": (8, {"parallel": sharded(1), "dispatch": BUDGET, "memory": STASH}),
    "without stages, merged": (4, {"parallel": {"experts": {"ep": 4}}, "pipeline": {"use": "merged"}}),
    "muon": (
        4,
        {"parallel": {"pp": 2, "dense": {"shard": "all"}}, "train": {**TRAIN, "optimizer": {"use": "muon"}}},
    ),
}
MICRO_BATCHES: Final = 6


@pytest.mark.parametrize(
    "name",
    quick(
        SPECS,
        "uneven stages, dense layers first, a token further ahead",
        "dualpipe-v, merged, recomputed",
        "gathered for each pass, recomputed",
    ),
)
def test_a_ledger_is_that_of_all_measurements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, given = SPECS[name]
    tree = {"model": DEEPER, "attention": ATTENTION, "precision": {"use": "bf16"}, "train": TRAIN, "run": RUN, **given}
    assembly = assembly_of(tree, world)
    found = measure(assembly, MICRO_BATCHES)
    monkeypatch.setattr(KnownResults, "__torch_dispatch__", FakeTensorMode.__torch_dispatch__)
    monkeypatch.setattr(Usage, "most_before_gradients", lambda usage: 2**62)
    monkeypatch.setattr(
        "moefw.planner.measurement.measure.recorded", lambda *given, only=None, **options: recorded(*given, **options)
    )
    at = {position: measure_at(assembly, MICRO_BATCHES, position) for position in alike_positions(assembly, 6)}
    assert evolve(found, positions=(), flops_per_token=None) == at[found.position]
    assert [position.peak_bytes for position in found.positions] == [ledger.peak_bytes for ledger in at.values()]
    assert [position.work for position in found.positions] == [ledger.work for ledger in at.values()]
