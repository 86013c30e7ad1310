"""``train.graphs`` is refused, with every reason at once, where a step would not be the same at every replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import MoefwError
from moefw.core.site import Machine

GPU = Machine(device="cuda", num_devices=8, capability="9.0")
STATIC = {"use": "alltoall", "rank_capacity": 1.5, "on_overflow": "rerun", "max_tokens": 2048}
HOPS = {**STATIC, "use": "hybridep", "backend": "torch"}
EP2 = {"experts": {"ep": 2}}


def complaints(spec: Mapping[str, Any], machine: Machine = GPU, world: int | None = None) -> list[str]:
    """What a spec with graphs is refused for."""
    tree = {"precision": {"use": "bf16"}, "dispatch": {"use": "alltoall"}, **spec}
    tree["train"] = {"graphs": "step", **spec.get("train", {})}
    try:
        assemble_tree(tree, Marks("spec"), defaults=defaults(), machine=machine, world=world)
    except MoefwError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"dispatch": {"use": "hybridep", "backend": "torch"}},
        {"parallel": {"dense": {"dp": 2}}},
        {"parallel": EP2, "dispatch": STATIC},
        {"parallel": EP2, "dispatch": HOPS},
        {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}, "dispatch": STATIC},
        {"memory": [{"use": "recompute", "regions": ["layer"]}]},
        {"memory": [{"use": "optimizer-bf16"}, {"use": "optimizer-offload"}]},
        {"dispatch": STATIC, "memory": [{"use": "paged-stash", "regions": ["experts"]}]},
        {"dispatch": STATIC, "precision": {"use": "fp8-blockwise", "backend": "torch"}},
    ],
    ids=str,
)
def test_steps_that_are_the_same_at_every_replay_are_accepted(spec: Mapping[str, Any]) -> None:
    assert complaints(spec) == []


PARTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "loop": ({"gemm": {"use": "loop"}}, "loop offers never"),
    "fp32": ({"precision": {"use": "fp32"}}, "fp32 offers never"),
    "emulated": (
        {"dispatch": STATIC, "precision": {"use": "mxfp8", "backend": "emulate"}},
        "mxfp8 offers never",
    ),
    "not seen on a GPU": (
        {"dispatch": STATIC, "precision": {"use": "fp8-tensor", "backend": "torch"}},
        "fp8-tensor offers never",
    ),
    "sinkhorn": ({"routing": {"use": "sinkhorn"}}, "sinkhorn offers never"),
    "flex": ({"attention": {"use": "gqa", "kernel": "flex"}}, "gqa offers never"),
    "offload": ({"memory": [{"use": "offload", "regions": ["attn_norm"]}]}, "offload offers never"),
    "spilled": (
        {"dispatch": STATIC, "memory": [{"use": "paged-stash", "regions": ["experts"], "spill": "host"}]},
        "paged-stash offers never",
    ),
    "ragged rows": ({"parallel": EP2}, "alltoall offers alone"),
    "no most tokens": ({"parallel": EP2, "dispatch": {**STATIC, "max_tokens": None}}, "alltoall offers alone"),
    "hops without most tokens": (
        {"parallel": EP2, "dispatch": {**HOPS, "max_tokens": None}},
        "hybridep offers alone",
    ),
    "gathered": ({"parallel": EP2, "dispatch": {"use": "allgather"}}, "allgather offers alone"),
    "split experts": ({"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}}, "alltoall offers alone"),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_that_no_graph_holds_is_named(case: str) -> None:
    spec, part = PARTS[case]
    (told,) = complaints(spec)
    assert "train.graphs: step needs the same operators and shapes at every step" in told
    assert f"; {part}. Use train.graphs: none." in told


OTHERS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "pipeline": ({"parallel": {"pp": 2}}, "the passes of the pipeline 1f1b are not captured"),
    "merged": ({"pipeline": {"use": "merged"}}, "the passes of the pipeline merged are not captured"),
    "delayed": ({"train": {"delay_wgrads": True}}, "delayed weight gradients run phase by phase"),
    "packs": ({"train": {"packing": "static"}}, "with packing: static, the sequences of a pack differ at every step"),
    "routes": ({"train": {"record_routes": True}}, "a replay runs no Python"),
    "shards": (
        {"parallel": {"dense": {"dp": 2, "shard": 2}}},
        "FSDP shards parameters (dense) over 2 ranks",
    ),
    "aligned rows": (
        {"precision": {"use": "fp8-blockwise", "backend": "torch"}},
        "groups of rows are padded to multiples of 128, and the host reads how many that makes. Set a budget",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_step_that_no_graph_holds_has_its_reason(case: str) -> None:
    spec, reason = OTHERS[case]
    (told,) = complaints(spec)
    assert reason in told
    assert "train.graphs" in told


def test_the_digest_differs_with_graphs() -> None:
    specs = ({"precision": {"use": "bf16"}, "train": {"graphs": graphs}} for graphs in ("none", "step"))
    first, second = (assemble_tree(spec, Marks("spec"), defaults=defaults(), machine=GPU).digest() for spec in specs)
    assert first != second


def test_a_cpu_has_no_graphs() -> None:
    (told,) = complaints({}, Machine())
    assert "train.graphs: step needs device cuda: PyTorch has graphs of CUDA GPUs only; this machine offers cpu" in told


def test_every_reason_is_told_at_once() -> None:
    spec: dict[str, Any] = {"parallel": {**EP2, "dense": {"shard": 2}}, "gemm": {"use": "loop"}}
    spec |= {"routing": {"use": "sinkhorn"}, "train": {"record_routes": True, "packing": "static"}}
    told = complaints(spec, Machine())
    assert any("sinkhorn offers never, alltoall offers alone, loop offers never" in one for one in told)
    for reason in ("device cuda", "FSDP shards", "with packing: static", "a replay runs no Python"):
        assert any(reason in one for one in told)


def test_nothing_is_concluded_from_a_part_that_could_not_be_read() -> None:
    told = complaints({"memory": [{"use": "recompile", "regions": ["layer"]}], "gemm": {"use": "loop"}})
    assert [one for one in told if "replay" in one] == []
    assert any("no plugin is called 'recompile'" in one for one in told)
