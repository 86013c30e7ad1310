"""What the planner does not measure twice: the ledger is the same, number for number, as if it did."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import pytest
from attrs import evolve
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ledger_cases import ATTENTION, BUDGET, MODEL, RUN, TRAIN, assembly_of, offload, recompute
from moefw.planner.measurement import measure as measurement
from moefw.planner.measurement.alike import alike_positions
from moefw.planner.measurement.measure import measure, measure_at, recorded
from moefw.planner.measurement.usage import Usage
from moefw.recording.known_results import KnownResults
from moefw.runtime import optimizer_states
from moefw_kernels.quantize import reference
from moefw_kernels.random import stream
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
    "mxfp8, merged, recomputed": (
        4,
        {
            "precision": {"use": "mxfp8", "backend": "emulate"},
            "parallel": {"pp": 2, "experts": {"ep": 2}},
            "pipeline": {"use": "interleaved", "merged": True},
            "memory": [recompute("mlp_norm", "expert_fc1")],
        },
    ),
    "blocks of 128, gathered as codes": (
        8,
        {
            "precision": {"use": "fp8-blockwise", "backend": "emulate", "primary_weights": "fp8"},
            "parallel": sharded(2),
        },
    ),
    "nvfp4": (1, {"precision": {"use": "nvfp4", "backend": "emulate"}}),
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
        "nvfp4",
        "gathered for each pass, recomputed",
    ),
)
def test_a_ledger_is_that_of_all_measurements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, given = SPECS[name]
    tree = {"model": DEEPER, "attention": ATTENTION, "precision": {"use": "bf16"}, "train": TRAIN, "run": RUN, **given}
    assembly = assembly_of(tree, world)
    found = measure(assembly, MICRO_BATCHES)
    monkeypatch.setattr(KnownResults, "__torch_dispatch__", FakeTensorMode.__torch_dispatch__)
    monkeypatch.setattr(measurement, "functions_known", lambda *given: nullcontext())
    monkeypatch.setattr(Usage, "most_before_gradients", lambda usage: 2**62)
    monkeypatch.setattr(measurement, "recorded", lambda *given, only=None, **options: recorded(*given, **options))
    at = {position: measure_at(assembly, MICRO_BATCHES, position) for position in alike_positions(assembly, 6)}
    assert evolve(found, positions=(), flops_per_token=None) == at[found.position]
    assert [position.peak_bytes for position in found.positions] == [ledger.peak_bytes for ledger in at.values()]
    assert [position.work for position in found.positions] == [ledger.work for ledger in at.values()]


def test_a_quantizer_does_not_run_twice_for_tensors_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = {"use": "mxfp8", "backend": "emulate"}
    tree = {"model": MODEL, "attention": ATTENTION, "precision": precision, "train": TRAIN, "run": RUN}
    ledger = measure(assembly_of(tree, 1), MICRO_BATCHES)
    monkeypatch.setattr(reference, "block_amax", lambda *given: pytest.fail("a quantizer ran"))
    assert measure(assembly_of(tree, 1), MICRO_BATCHES) == ledger


def test_random_bits_of_an_optimizer_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def stream_noted(key: int, places: Tensor) -> Tensor:
        bits = stream(key, places)
        drawn.append(bits)
        return bits

    monkeypatch.setattr(optimizer_states, "stream", stream_noted)
    tree = {"model": MODEL, "attention": ATTENTION, "precision": {"use": "bf16"}, "train": TRAIN, "run": RUN}
    measure(assembly_of({**tree, "memory": [{"use": "optimizer-bf16"}]}, 1), MICRO_BATCHES)
    assert drawn
    assert all(isinstance(bits, FakeTensor) for bits in drawn)
