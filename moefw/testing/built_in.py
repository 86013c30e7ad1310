"""Variants of the built-in plugins for combinations, with the oracle's settings for each. Options, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


def _routing(use: str, label: str, words: Mapping[str, Any], *, also: Mapping[str, Any] | None = None) -> Any:
    """A router's variant. Its options have the same names as the oracle's, except for ``also``."""
    same = {key: value for key, value in words.items() if key in ("score", "pre_softmax", "renormalise", "scale")}
    return label, {"use": use, **same, **(also or {})}, {"words": words}


def _topk(label: str, score: str, also: Mapping[str, Any] | None = None, /, **words: Any) -> Any:
    return _routing("topk", label, {"score": score, **words}, also=also)


def _aux(over: str) -> dict[str, Any]:
    return {"kind": "aux_loss", "coeff": 0.2, "over": over}


_Z: Final = {"kind": "z_loss", "coeff": 0.1}

_ROUTERS: Final = (
    _topk("softmax", "softmax"),
    _topk("pre-softmax, scaled", "softmax", pre_softmax=True, scale=1.5),
    _topk("sigmoid", "sigmoid"),
    _topk("sigmoid, not renormalised", "sigmoid", renormalise=False, scale=2.5),
    _topk("sqrtsoftplus", "sqrtsoftplus"),
    _topk("groups", "sigmoid", {"groups": {"count": 4, "keep": 2}}, groups=(4, 2)),
    _topk(
        "groups by their best", "sigmoid", {"groups": {"count": 4, "keep": 2, "best": 1}}, groups=(4, 2), group_best=1
    ),
    _topk("learned bias", "softmax", {"bias": True}),
    _topk("aux_loss over micro_batch", "softmax", {"balance": [_aux("micro_batch")]}, aux_coeff=0.2),
    _topk("aux_loss over sequence", "softmax", {"balance": [_aux("sequence")]}, sequence_aux_coeff=0.2),
    _topk("aux_loss over global_batch", "sigmoid", {"balance": [_aux("global_batch")]}, global_aux_coeff=0.2),
    _topk("z_loss", "softmax", {"balance": [_Z]}, z_coeff=0.1),
    _topk(
        "expert_bias with aux_loss",
        "sigmoid",
        {"balance": [{"kind": "expert_bias"}, _aux("micro_batch"), _Z]},
        aux_coeff=0.2,
        z_coeff=0.1,
    ),
    _topk("capacity by probs", "sigmoid", {"capacity": {"factor": 0.6}}, capacity=(0.6, "probs")),
    _topk(
        "capacity by position",
        "softmax",
        {"capacity": {"factor": 0.6, "drop": "position"}, "balance": [_aux("micro_batch")]},
        capacity=(0.6, "position"),
        aux_coeff=0.2,
    ),
    _topk("capacity, padded", "sigmoid", {"capacity": {"factor": 0.6, "pad": True}}, capacity=(0.6, "probs")),
    _topk("jitter", "sigmoid", {"jitter": 0.4}),
    _topk("fp64", "sigmoid", {"dtype": "fp64", "balance": [_aux("micro_batch")]}, aux_coeff=0.2),
)
_QUANTILE: Final = ("quantile", {"use": "topk", "balance": [{"kind": "quantile"}]})

_NODES: Final = {"ranks_per_node": 2}
_FOLDED: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (
    ("one rank", {}, 1),
    ("2 ranks, ep 2", {"experts": {"ep": 2}}, 2),
    ("2 ranks, edp 2", {}, 2),
    ("2 ranks, etp 2", {"experts": {"etp": 2}}, 2),
    ("4 ranks, ep 4 over two nodes", {"experts": {"ep": 4}, **_NODES}, 4),
    ("4 ranks, ep 4 in one node", {"experts": {"ep": 4}}, 4),
    ("4 ranks, ep 4, nodes of 3", {"experts": {"ep": 4}, "ranks_per_node": 3}, 4),
    ("4 ranks, ep 2, edp 2", {"experts": {"ep": 2}}, 4),
    ("4 ranks, ep 2, etp 2 over two nodes", {"experts": {"ep": 2, "etp": 2}, **_NODES}, 4),
    ("4 ranks, etp 2, edp 2", {"experts": {"etp": 2}}, 4),
    ("4 ranks, etp 4", {"experts": {"etp": 4}}, 4),
    ("2 ranks, tp 2", {"dense": {"tp": 2}}, 2),
    ("4 ranks, tp 2, ep 4", {"dense": {"tp": 2}, "experts": {"ep": 4}}, 4),
    ("4 ranks, ep 2 outermost", {"experts": {"ep": 2, "order": ["ep", "etp", "edp"]}}, 4),
    ("2 ranks, all sharded", {"dense": {"shard": "all"}, "experts": {"shard": "all"}}, 2),
    ("4 ranks, ep 2, sharded over 2", {"dense": {"shard": 2}, "experts": {"ep": 2, "shard": 2}}, 4),
    ("2 ranks, cp 2", {"dense": {"cp": 2}}, 2),
    ("4 ranks, cp 2, ep 2, etp 2", {"dense": {"cp": 2}, "experts": {"ep": 2, "etp": 2}}, 4),
)
_COUPLED: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (
    ("2 ranks, ep 2", {"ep": 2}, 2),
    ("4 ranks, tp 2, ep 2", {"tp": 2, "ep": 2}, 4),
    ("4 ranks, ep 2, all sharded", {"ep": 2, "shard": "all", "expert_shard": "all"}, 4),
    ("4 ranks, cp 2, ep 2", {"cp": 2, "ep": 2}, 4),
)
_FOLDED_PP: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (
    ("2 ranks, pp 2", {"pp": 2}, 2),
    ("4 ranks, pp 2, ep 2", {"pp": 2, "experts": {"ep": 2}}, 4),
    ("4 ranks, pp 2, tp 2, etp 2", {"pp": 2, "dense": {"tp": 2}, "experts": {"etp": 2}}, 4),
    ("4 ranks, pp 2, cp 2, ep 2", {"pp": 2, "dense": {"cp": 2}, "experts": {"ep": 2}}, 4),
    ("4 ranks, pp 2, all sharded", {"pp": 2, "dense": {"shard": "all"}, "experts": {"shard": "all"}}, 4),
)
_COUPLED_PP: Final[tuple[tuple[str, Mapping[str, Any], int], ...]] = (("4 ranks, pp 2, tp 2", {"pp": 2, "tp": 2}, 4),)


def _layouts(use: str, rows: tuple[tuple[str, Mapping[str, Any], int], ...]) -> Any:
    return tuple(
        (label, {"use": use, **sizes}, {"world": world, "pp": sizes.get("pp", 1)}) for label, sizes, world in rows
    )


def _budget(label: str, on_overflow: str, **choice: Any) -> Any:
    budget = {"rank_capacity": 0.6, "on_overflow": on_overflow}
    return label, {**choice, **budget}, {"budget": 0.6, "by_source": choice["use"] == "alltoall"}


def _quantized(use: str, label: str, **options: Any) -> Any:
    return label, {"use": use, "backend": "emulate", **options}, {"rtol": 0.4, "floor": 0.5}


def _offload(*regions: str) -> dict[str, Any]:
    return {"use": "offload", "regions": list(regions), "min_bytes": 0}


def _stash(*regions: str) -> dict[str, Any]:
    return {"use": "paged-stash", "regions": list(regions), "factor": 0.3, "page_rows": 2, "spill": "host"}


def _recompute(*regions: str) -> tuple[str, Any, dict[str, Any]]:
    return ", ".join(regions), [{"use": "recompute", "regions": list(regions)}], {}


BUILT_IN: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "routing": {
        "topk": (
            *_ROUTERS,
            (*_QUANTILE, {"words": {"score": "softmax"}, "state": ("beta_E",), "needs_all_tokens": True}),
        ),
        "sinkhorn": (
            (
                "",
                {"use": "sinkhorn", "z_loss": 0.1},
                {"words": {"kind": "sinkhorn", "z_coeff": 0.1}, "smallest": 4, "needs_all_tokens": True},
            ),
        ),
        "forced": (
            ("", {"use": "forced", "known_counts": False}, {"words": {"kind": "forced"}}),
            ("counts known", {"use": "forced"}, {"words": {"kind": "forced"}, "equal_tokens": True}),
        ),
    },
    "dispatch": {
        "allgather": (("", {"use": "allgather"}, {}),),
        "alltoall": (
            ("", {"use": "alltoall"}, {}),
            ("wire fp8", {"use": "alltoall", "wire": "fp8"}, {}),
            _budget("budget, rerun", "rerun", use="alltoall"),
        ),
        "deepep": (
            ("torch", {"use": "deepep", "backend": "torch"}, {}),
            ("library", {"use": "deepep", "backend": "library"}, {}),
            (
                "library, grouped",
                {"use": "deepep", "backend": "library", "max_tokens": 64, "grouped": True},
                {},
            ),
        ),
        "hybridep": (
            ("torch", {"use": "hybridep", "backend": "torch"}, {}),
            ("torch, wire fp8", {"use": "hybridep", "backend": "torch", "wire": "fp8"}, {}),
            _budget("torch, budget, rerun", "rerun", use="hybridep", backend="torch"),
            _budget("torch, budget, drop", "drop", use="hybridep", backend="torch"),
            ("library", {"use": "hybridep", "backend": "library"}, {}),
            _budget("library, budget, drop", "drop", use="hybridep", backend="library"),
        ),
    },
    "gemm": {
        "loop": (("", {"use": "loop"}, {}),),
        "grouped": (("", {"use": "grouped"}, {}), ("pad_rows", {"use": "grouped", "pad_rows": 16}, {})),
        "triton": (("", {"use": "triton"}, {}),),
    },
    "precision": {
        "fp32": (("", {"use": "fp32"}, {"rtol": 1e-4}),),
        "bf16": (("", {"use": "bf16"}, {"rtol": 4e-2, "floor": 0.1}),),
        "fp8-blockwise": (
            _quantized("fp8-blockwise", "emulate"),
            _quantized("fp8-blockwise", "emulate, fp32 scales, saved fp8", scales="fp32", saved_activations="fp8"),
            _quantized("fp8-blockwise", "torch", backend="torch"),
            _quantized("fp8-blockwise", "te", backend="te"),
        ),
        "mxfp8": (
            _quantized("mxfp8", "emulate"),
            _quantized("mxfp8", "torch", backend="torch"),
            _quantized("mxfp8", "te", backend="te"),
        ),
        "fp8-tensor": (
            _quantized("fp8-tensor", "emulate"),
            _quantized("fp8-tensor", "emulate, delayed", scaling="delayed"),
            _quantized("fp8-tensor", "torch", backend="torch"),
            _quantized("fp8-tensor", "te", backend="te"),
        ),
        "nvfp4": tuple(
            (backend, {"use": "nvfp4", "backend": backend, "keep_bf16": []}, {"rtol": 0.8, "floor": 0.5})
            for backend in ("emulate", "torch", "te")
        ),
    },
    "memory": {
        "keep": tuple((region, [{"use": "keep", "regions": [region]}], {}) for region in ("experts", "moe_act")),
        "recompute": (
            *(_recompute(region) for region in ("router", "shared_experts", "moe_act")),
            _recompute("dispatch", "expert_fc1"),
            _recompute("dispatch", "experts"),
        ),
        "offload": (
            ("experts", [_offload("experts")], {}),
            ("router, recompute experts", [_offload("router"), {"use": "recompute", "regions": ["experts"]}], {}),
        ),
        "paged-stash": (("experts", [_stash("experts")], {}),),
        "optimizer-bf16": (("", [{"use": "optimizer-bf16"}], {}),),
        "optimizer-8bit": (("", [{"use": "optimizer-8bit", "block": 16}], {}),),
        "optimizer-offload": (
            ("host, optimizer-bf16", [{"use": "optimizer-offload", "update": "host"}, {"use": "optimizer-bf16"}], {}),
        ),
    },
    "adapter": {
        "none": (("", {"use": "none"}, {}),),
        "lora": (("", {"use": "lora", "rank": 8, "alpha": 4.0}, {"adapter_scale": 0.5}),),
        "dora": (),  # it has none of experts
    },
    "pipeline": {
        "interleaved": (
            ("", {"use": "interleaved"}, {}),
            ("merged", {"use": "interleaved", "merged": True}, {}),
        ),
        "dualpipe-v": (
            ("", {"use": "dualpipe-v"}, {}),
            ("merged", {"use": "dualpipe-v", "merged": True}, {}),
        ),
    },
    "parallel": {
        "folded": _layouts("folded", (*_FOLDED, *_FOLDED_PP)),
        "coupled": _layouts("coupled", (*_COUPLED, *_COUPLED_PP)),
    },
}
"""By section and plugin: label, choice, other fields of the variant. Read by :func:`moefw.testing.variants.of_part`."""
