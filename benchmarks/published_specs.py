"""Specs of published rows: their layouts, as a user of moefw writes them.

Megatron's distributed optimizer is ``zero: 1`` over all copies, and so is FSDP that keeps weights gathered for a step;
recompute of modules is ``recompute`` of the same regions. Formats are emulated and libraries of dispatchers stood in
for: products and what is sent stay the same. ``published/recipes.csv`` has what recipes say of states and recompute
that the pages of rows do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from closed_form import stages_of
from published_rows import PRESETS, RECOMPUTED, STATES, Row

REGIONS: Final = {
    "full": ("attn_norm", "attention", "mlp_norm", "router", "dispatch", "experts", "shared_experts", "dense_mlp"),
}
"""Regions of a spec for modules of recompute that are larger than those of the closed form."""
PRECISION: Final = {
    "bf16": {"use": "bf16"},
    "fp8": {"use": "fp8-tensor", "backend": "emulate"},
    "mxfp8": {"use": "mxfp8", "backend": "emulate"},
    "fp8block": {"use": "fp8-blockwise", "backend": "emulate"},
}
GRADIENTS: Final = {"": "float32", "bf16": "bfloat16"}
LIBRARIES: Final = ("deepep", "hybridep")
LETTERS: Final = {"embedding": "E", "dense": "t", "moe": "t", "mtp": "m", "head": "L"}
"""What stages hold, in the letters of a spec."""


def spec_of(row: Row) -> dict[str, Any]:
    """Spec of a row's layout."""
    layout = row.layout
    sharded = {"shard": "all", "zero": layout.zero}
    merged = bool(row.software.ep_overlap)
    pipeline: dict[str, Any] = {"use": "1f1b"}
    if layout.pp == 1 and merged:
        pipeline = {"use": "merged"}
    elif layout.pp > 1 and layout.chunks > 1:
        pipeline = {"use": "interleaved", "chunks": layout.chunks, "merged": merged}
    if layout.pp > 1:
        stages = ("".join(LETTERS[unit] for unit in stage) for stage in stages_of(row.sizes, layout))
        pipeline["layout"] = "|".join(stages)
    dispatcher = row["dispatcher"] or "alltoall"
    return {
        "model": {"preset": PRESETS[row["model"]], **_layers(row)},
        "precision": PRECISION[row["precision"]],
        "train": {
            "seq_len": row.number("seq_len"),
            "tokens_per_step": row.tokens,
            "micro_batch": row.number("micro_batch"),
            "main_gradients": GRADIENTS[row.recipe.get("gradients", "")],
        },
        "parallel": {
            "pp": layout.pp,
            "dense": {"tp": layout.tp, "cp": layout.cp, **sharded},
            "experts": {"ep": layout.ep, "etp": layout.expert_tp, **sharded},
            "ranks_per_node": layout.node_gpus,
        },
        "pipeline": pipeline,
        "memory": [*policies_of(row)],
        "dispatch": {"use": dispatcher, **({"backend": "torch"} if dispatcher in LIBRARIES else {})},
    }


def policies_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the memory policies of a row, as its page or its recipe says."""
    regions = [region for module in row.recomputed for region in REGIONS.get(module, RECOMPUTED[module])]
    if regions:
        yield {"use": "recompute", "regions": regions}
    if states := row.recipe.get("states"):
        yield {"use": f"optimizer-{states}"}
    if STATES in row.offload:
        yield {"use": "optimizer-offload", "update": "device"}


def _layers(row: Row) -> dict[str, int]:
    """Layers of a row's model that are not those of its preset."""
    sizes = row.sizes
    layers = {"mtp_layers": sizes.mtp} if sizes.mtp else {}
    if row["layers"]:
        layers |= {"num_layers": sizes.layers, "num_dense_layers": sizes.dense_layers}
    return layers
