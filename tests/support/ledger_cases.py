"""Specs whose whole steps are measured, with FSDP and every layer, and comparisons of the ledger with them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefw import hookimpl
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.context import BuildContext
from moefw.core.contracts import MemoryPolicy
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.core.site import Machine
from moefw.planner import Ledger, ledger
from moefw.planner.report import Work
from moefw.training.measured import Measured, measure

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_dispatcher"
sys.path.insert(0, str(EXAMPLE))

import moefw_ring  # noqa: E402

UPDATE = ("gradients", "optimizer")
SUMS_OF_METRICS = 2**14
"""Bytes that ranks sum in a step beside gradients."""
ONCE = ("once", *UPDATE)
"""Phases of work that is done once a step."""
SAVED, PEAK = 0.01, 0.005
"""Allowed relative errors of predictions."""
SCALARS = 512
"""Bytes that PyTorch 2.11 keeps in addition to the tokens, some for each parameter."""

MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "num_layers": 2,
    "dense_dim": 512,
    "num_experts": 16,
    "top_k": 4,
    "expert_dim": 128,
}
ATTENTION = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
TRAIN = {"micro_batch": 2, "seq_len": 256, "tokens_per_step": 4096}
LONGER = {**TRAIN, "tokens_per_step": 8192}
"""Four micro-batches where dp is 4."""
BRIEF = {**TRAIN, "tokens_per_step": 2048}
"""One micro-batch where dp is 4."""
FROZEN = {"freeze": ["layers.*.moe.experts.*", "embed.weight"], "weights": "of-no-folder"}
OVER_A_FOLDER = {"weights": "of-no-folder"}
LORA = {"use": "lora", "rank": 8}
RUN = {"device": "cpu"}
SHARED_OUT: dict[str, Any] = {
    "model": {**MODEL, "num_layers": 3, "num_dense_layers": 1},
    "attention": ATTENTION,
    "precision": {"use": "bf16"},
    "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 4, "shard": "all"}},
    "train": TRAIN,
    "run": RUN,
}
LOOPING: dict[str, Any] = {
    "model": {**MODEL, "shared_expert_dim": 128},
    "attention": {**ATTENTION, "qk_norm": "none"},
    "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "z_loss"}]},
    "gemm": {"use": "loop"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
ONCE_A_RANK: dict[str, Any] = {
    "model": MODEL,
    "attention": ATTENTION,
    "precision": {"use": "bf16"},
    "routing": {"use": "topk", "balance": [{"kind": "aux_loss", "over": "sequence"}]},
    "dispatch": {"use": "deepep", "backend": "torch"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
IN_PARTS: dict[str, Any] = {
    "model": {**MODEL, "tie_embeddings": True},
    "attention": ATTENTION,
    "precision": {"use": "bf16"},
    "routing": {"use": "forced"},
    "dispatch": {"use": "allgather"},
    "parallel": {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2, "shard": 2}},
    "train": TRAIN,
    "run": RUN,
}


def recompute(*regions: str) -> dict[str, Any]:
    return {"use": "recompute", "regions": list(regions)}


def offload(*regions: str) -> dict[str, Any]:
    return {"use": "offload", "regions": list(regions), "min_bytes": 1}


def zeros(dense: int, experts: int) -> dict[str, Any]:
    """Return the layout of ``SHARED_OUT`` with these stages of ZeRO."""
    parallel = SHARED_OUT["parallel"]
    return {"dense": {**parallel["dense"], "zero": dense}, "experts": {**parallel["experts"], "zero": experts}}


def emulated(use: str, **options: Any) -> dict[str, Any]:
    return {"use": use, "backend": "emulate", **options}


FOUR = {**MODEL, "num_layers": 4}
LONG = {**MODEL, "num_layers": 6, "num_dense_layers": 2}
"""Two dense layers and four MoE layers, of which three are run for a plan."""
SHALLOW = {**LOOPING["model"], "num_layers": 1}
BUDGET = {"use": "hybridep", "backend": "torch", "rank_capacity": 2.0, "on_overflow": "rerun"}

CODES_GATHERED: dict[str, Any] = {
    **SHARED_OUT,
    "precision": emulated("fp8-blockwise", primary_weights="fp8", keep_bf16=["*.attention"]),
    "parallel": {"dense": {"shard": 2}, "experts": {"ep": 2, "shard": 2}},
}

SPECS: dict[str, tuple[dict[str, Any], int]] = {
    "sharded": (SHARED_OUT, 8),
    "sharded, norms and dispatch recomputed, one micro-batch": (
        {**SHARED_OUT, "train": BRIEF, "memory": [recompute("attn_norm", "mlp_norm", "dispatch")]},
        8,
    ),
    "sharded, layers recomputed": ({**SHARED_OUT, "train": BRIEF, "memory": [recompute("layer")]}, 8),
    "sharded, experts recomputed, attention offloaded, one micro-batch": (
        {**SHARED_OUT, "train": BRIEF, "memory": [offload("attention"), recompute("attn_norm", "experts")]},
        8,
    ),
    "sharded, six layers": ({**SHARED_OUT, "train": BRIEF, "model": LONG}, 8),
    "sharded, six layers offloaded, one micro-batch": (
        {**SHARED_OUT, "model": LONG, "train": BRIEF, "memory": [offload("attention", "experts")]},
        8,
    ),
    "sharded, two tokens ahead": ({**SHARED_OUT, "train": BRIEF, "model": {**MODEL, "mtp_layers": 2}}, 8),
    "windows in every other layer, and two layers more": (
        {
            **LOOPING,
            "train": BRIEF,
            "model": {**MODEL, "num_layers": 12, "num_dense_layers": 2},
            "attention": {**ATTENTION, "window": 32, "full_layers": [0, 1, 3, 5, 7, 9, 11]},
        },
        4,
    ),
    "loop": (LOOPING, 4),
    "loop, parts recomputed": ({**LOOPING, "train": BRIEF, "memory": [recompute("qkv", "router", "expert_fc1")]}, 4),
    "loop, delayed scales": (
        {
            **LOOPING,
            "model": SHALLOW,
            "train": BRIEF,
            "precision": emulated("fp8-tensor", scaling="delayed", history=4),
        },
        4,
    ),
    "once a rank": (ONCE_A_RANK, 4),
    "once a rank, four bits": ({**ONCE_A_RANK, "model": FOUR, "train": BRIEF, "precision": emulated("nvfp4")}, 4),
    "once a rank, codes on the wire": (
        {
            **ONCE_A_RANK,
            "model": {**MODEL, "num_layers": 1},
            "train": BRIEF,
            "precision": emulated("mxfp8", saved_activations="int8"),
            "dispatch": {"use": "deepep", "backend": "torch", "wire": "fp8"},
        },
        4,
    ),
    "once a node, pages": (
        {**ONCE_A_RANK, "dispatch": BUDGET, "memory": [{"use": "paged-stash", "regions": ["experts"], "page_rows": 8}]},
        4,
    ),
    "static rows, pages": (
        {
            **ONCE_A_RANK,
            "train": BRIEF,
            "dispatch": {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun"},
            "memory": [{"use": "paged-stash", "regions": ["experts"], "page_rows": 8}],
        },
        4,
    ),
    "in parts": (IN_PARTS, 8),
    "in parts, offloaded": ({**IN_PARTS, "memory": [offload("experts")]}, 8),
    "in parts, groups filled": (
        {**IN_PARTS, "train": BRIEF, "routing": {"use": "topk", "capacity": {"factor": 1.5, "pad": True}}},
        8,
    ),
    "sinkhorn": ({**ONCE_A_RANK, "train": BRIEF, "routing": {"use": "sinkhorn", "z_loss": 0.1, "dtype": "fp64"}}, 4),
    "quantiles, jitter, coupled": (
        {
            **ONCE_A_RANK,
            "routing": {"use": "topk", "jitter": 0.1, "balance": [{"kind": "quantile"}]},
            "dispatch": {"use": "alltoall"},
            "parallel": {"use": "coupled", "ep": 4, "expert_shard": 2, "shard": "all"},
        },
        8,
    ),
    "packs of documents that ranks share": (
        {
            **ONCE_A_RANK,
            "train": {**BRIEF, "packing": "static"},
            "parallel": {"dense": {"cp": 2, "shard": "all"}, "experts": {"ep": 4}},
        },
        4,
    ),
    "gradients in bf16": (
        {
            **ONCE_A_RANK,
            "train": {**TRAIN, "main_gradients": "bfloat16"},
            "parallel": {"experts": {"ep": 4, "shard": "all"}},
        },
        4,
    ),
    "gradients reduced once": (
        {**SHARED_OUT, "parallel": zeros(1, 1)},
        8,
    ),
    "weights gathered once": ({**SHARED_OUT, "parallel": zeros(2, 2)}, 8),
    "dense gathered and reduced once": ({**SHARED_OUT, "parallel": zeros(1, 3)}, 8),
    "experts gathered and reduced once": ({**SHARED_OUT, "parallel": zeros(3, 1), "train": LONGER}, 8),
    "experts gathered and reduced once, in bf16": (
        {**SHARED_OUT, "parallel": zeros(3, 1), "train": {**LONGER, "main_gradients": "bfloat16"}},
        8,
    ),
    "gathered once, one micro-batch": ({**SHARED_OUT, "parallel": zeros(1, 2), "train": BRIEF}, 8),
    "gathered once, six layers": ({**SHARED_OUT, "parallel": zeros(2, 1), "model": LONG}, 8),
    "gathered once, recomputed": ({**SHARED_OUT, "parallel": zeros(2, 2), "memory": [recompute("layer")]}, 8),
    "gathered once, experts and embedding frozen": (
        {**SHARED_OUT, "parallel": zeros(1, 2), "train": {**TRAIN, **FROZEN}},
        8,
    ),
    "sharded, states in 8 bits": (
        {**SHARED_OUT, "train": BRIEF, "memory": [{"use": "optimizer-8bit", "block": 128}]},
        8,
    ),
    "biases, states in 8 bits off the device": (
        {
            **LOOPING,
            "model": {**MODEL, "biased_experts": True},
            "gemm": {"use": "grouped"},
            "train": BRIEF,
            "memory": [{"use": "optimizer-offload"}, {"use": "optimizer-8bit"}],
        },
        4,
    ),
    "experts and embedding frozen": ({**ONCE_A_RANK, "train": {**TRAIN, **FROZEN}}, 4),
    "sharded, experts and embedding frozen": ({**SHARED_OUT, "train": {**TRAIN, **FROZEN}}, 8),
    "adapters": ({**ONCE_A_RANK, "adapter": LORA, "train": {**TRAIN, **OVER_A_FOLDER}}, 4),
    "sharded, adapters": ({**SHARED_OUT, "adapter": LORA, "train": {**TRAIN, **OVER_A_FOLDER}}, 8),
    "loop, directions and magnitudes": (
        {**LOOPING, "adapter": {"use": "dora"}, "train": {**LOOPING["train"], **OVER_A_FOLDER}},
        4,
    ),
    "weight gradients delayed": ({**ONCE_A_RANK, "train": {**TRAIN, "delay_wgrads": True}}, 4),
    "merged": ({**ONCE_A_RANK, "train": LONGER, "pipeline": {"use": "merged"}}, 4),
    "merged, pages": (
        {
            **ONCE_A_RANK,
            "train": LONGER,
            "pipeline": {"use": "merged"},
            "dispatch": BUDGET,
            "memory": [{"use": "paged-stash", "regions": ["experts"], "page_rows": 8}],
        },
        4,
    ),
    "merged, six layers, weight gradients delayed": (
        {
            **ONCE_A_RANK,
            "model": LONG,
            "train": {**LONGER, "delay_wgrads": True},
            "pipeline": {"use": "merged"},
            "memory": [recompute("mlp_norm", "dispatch", "expert_fc1"), offload("attention")],
        },
        4,
    ),
    "merged, twelve layers alike": (
        {**ONCE_A_RANK, "model": {**MODEL, "num_layers": 12}, "train": LONGER, "pipeline": {"use": "merged"}},
        4,
    ),
    "merged, dense layers before and twelve alike behind": (
        {
            **ONCE_A_RANK,
            "model": {**MODEL, "num_layers": 18, "num_dense_layers": 6},
            "train": LONGER,
            "pipeline": {"use": "merged"},
        },
        4,
    ),
    "choices dropped": ({**ONCE_A_RANK, "train": BRIEF, "routing": {"use": "topk", "capacity": {"factor": 0.5}}}, 4),
    "a third party's dispatcher and memory policy": (
        {
            **SHARED_OUT,
            "dispatch": {"use": "ring"},
            "memory": [{"use": "halves", "regions": ["core_attn", "experts"]}],
        },
        8,
    ),
}

QUICK = (
    "merged, twelve layers alike",
    "merged, six layers, weight gradients delayed",
    "sharded, six layers offloaded, one micro-batch",
    "loop, delayed scales",
    "once a rank, codes on the wire",
    "static rows, pages",
    "in parts, groups filled",
    "packs of documents that ranks share",
    "experts gathered and reduced once, in bf16",
    "sharded, experts and embedding frozen",
    "a third party's dispatcher and memory policy",
)
"""Specs that together have every dispatcher, GEMM and layout, and every way of memory policies."""


@frozen
class Halves(MemoryPolicyPlugin, MemoryPolicy):
    """Keeps the first half of the bytes of each tensor, which makes it of no use, and says nothing about memory."""

    name: ClassVar[str] = "halves"
    mechanism: ClassVar[str] = "keep"

    def build(self, context: BuildContext) -> MemoryPolicy:
        return self

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def treated(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(_half, _whole):
                return function(*args, **kwargs)

        return treated


def _half(saved: Tensor) -> Tensor | tuple[Tensor, torch.Size]:
    if not saved.is_floating_point() or isinstance(saved, nn.Parameter) or saved.numel() % 2:
        return saved.detach()
    return saved.detach().flatten()[: saved.numel() // 2].clone(), saved.shape


def _whole(held: Tensor | tuple[Tensor, torch.Size]) -> Tensor:
    return held if isinstance(held, Tensor) else torch.cat([held[0], held[0]]).view(held[1])


def assembly_of(tree: dict[str, Any], world: int) -> Assembly:
    registry = Registry(extra=[moefw_ring, SimpleNamespace(moefw_memory_policies=hookimpl(lambda: [Halves]))])
    machine = Machine(device="cpu")
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), registry=registry, world=world, machine=machine)


def check_held(found: Ledger, measured: Measured) -> None:
    held = found.held
    kinds = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    kinds |= {"buffers": held.buffers} if held.buffers else {}
    assert {**measured.held, "other": 0} == {**kinds, "other": 0}
    assert measured.held["other"] == pytest.approx(held.batch, abs=SCALARS)


def in_all(work: Iterable[Work], name: str, micro_batches: int = 1) -> Counter[tuple[str, Any]]:
    """Return how often each product or transfer happens, by phase, in all layers and micro-batches."""
    found: Counter[tuple[str, Any]] = Counter()
    for one in work:
        times = 1 if one.phase in ONCE else micro_batches
        for done in getattr(one, name):
            found[one.phase, evolve(done, times=1)] += one.layers * done.times * times
    return found


def check_work(found: Ledger, measured: Measured) -> None:
    """The ledger's micro-batch adds its gradients to those of an earlier one; the first measured one finds none."""
    for name in ("products", "transfers"):
        told = in_all(found.work, name, found.micro_batches)
        seen = in_all(measured.work, name)
        assert {done: told[done] for done in told if done[0] not in UPDATE} == {
            done: seen[done] for done in seen if done[0] not in UPDATE
        }
        # A step also sums its metrics over ranks, and the squares of its gradients.
        missing = told - seen
        assert not missing
        assert sum(times * _bytes_summed(done) for (_, done), times in (seen - told).items()) < SUMS_OF_METRICS
    for phase, allowed in {
        "forward": 0.002,
        "backward": 0.08,
        "recompute": 0.002,
        "once": 0.0,
        "optimizer": 0.02,
    }.items():
        times = 1 if phase in ONCE else found.micro_batches
        nbytes = sum(one.layers * one.nbytes for one in found.work if one.phase == phase) * times
        assert nbytes == pytest.approx(sum(one.nbytes for one in measured.work if one.phase == phase), rel=allowed)


def _bytes_summed(done: Any) -> int:
    """Bytes of what an all-reduce sums, of which a rank sends a copy to each of the others."""
    return int(done.node + done.network) // (done.ranks - 1)


def check(assembly: Assembly) -> None:
    measured = measure(assembly)
    found = ledger(assembly, micro_batches=measured.micro_batches)
    assert not found.unknown
    check_held(found, measured)
    assert found.totals["saved"] + found.pools == pytest.approx(measured.saved_bytes, rel=SAVED)
    # Each micro-batch in flight has buffers of its own, for as much of it as has run.
    offloaded = found.totals["offloaded"]
    assert offloaded <= measured.off_device - found.held.host <= found.in_flight * offloaded
    assert found.peak_bytes == pytest.approx(measured.peak, rel=PEAK), (found.peak, measured.peak_place)
    check_work(found, measured)
