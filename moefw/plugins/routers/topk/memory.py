"""What a top-k router takes: its logits or scores, the choices, and the chosen scores on their way to weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from moefw.core.ledger import FP32, INT64, Extent, PartMemory, Region, Tensor, Weight

if TYPE_CHECKING:
    from moefw.plugins.routers.topk import TopK

LOGITS: Final = "logits"
SCORES: Final = "scores"
PROBABILITIES: Final = "probabilities"
COUNTED: Final = {"expert_bias", "aux_loss", "z_loss"}


def memory(options: TopK, extent: Extent) -> PartMemory | None:
    """Return weight, bias and the region ``router``; None with options whose memory nobody has counted."""
    rules, levels = {rule.kind for rule in options.balance}, {rule.level for rule in options.balance}
    plain = options.groups is None and options.capacity is None and not options.jitter and options.dtype == "fp32"
    if not plain or not rules <= COUNTED:
        return None
    dims, x = extent.dims, extent.tokens_given()
    scores = extent.tokens * dims.num_experts * FP32
    ids = Tensor(name="chosen experts", nbytes=extent.choices * INT64)
    counts = Tensor(name="tokens per expert", nbytes=(dims.num_experts + 1) * FP32)
    router = Region(
        name="router",
        given=(x,),
        returns=("weights",),
        saves=(x, *_tensors(_scores(options, extent) | _losses(options, extent)), ids),
        holds=(ids, counts),
        forward_bytes=2 * scores + _wide(extent),
        backward_bytes=2 * scores + 2 * _wide(extent) + x.nbytes,
    )
    buffers = dims.num_experts * FP32 * len({"expert_bias", "aux_loss over global_batch"} & levels)
    weight = Weight(shape=(dims.num_experts, dims.model_dim), unit="root")
    return PartMemory(weights=(weight,), buffers=buffers, regions=(router,))


def _tensors(sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name=name, nbytes=nbytes) for name, nbytes in sizes.items())


def _scores(options: TopK, extent: Extent) -> dict[str, int]:
    """Return what scores and weights save: gathering the chosen keeps what it gathers from."""
    scores, chosen = extent.tokens * extent.dims.num_experts * FP32, extent.choices * FP32
    if options.score == "softmax":
        return {PROBABILITIES: scores} if options.pre_softmax else {LOGITS: scores, "softmax of chosen": chosen}
    kept = {SCORES: scores}
    if options.score == "sqrtsoftplus":
        kept |= {LOGITS: scores, "softplus": scores}
    renormalise = extent.dims.top_k > 1 if options.renormalise is None else options.renormalise
    return kept | ({"chosen scores": chosen, "their sum": extent.tokens * FP32} if renormalise else {})


def _losses(options: TopK, extent: Extent) -> dict[str, int]:
    """Return what the losses save: shares of experts, valid tokens, and for each level the tokens' rows and mass."""
    scores, each = extent.tokens * extent.dims.num_experts * FP32, extent.tokens * FP32
    kept: dict[str, int] = {}
    for rule in options.balance:
        if rule.kind in ("aux_loss", "z_loss"):
            kept |= {"valid tokens": each, "scale of losses": FP32}
        if rule.kind == "z_loss":
            kept |= {LOGITS: scores, "log-sum-exp of logits": each}
        if rule.kind == "aux_loss":
            kept |= {PROBABILITIES: scores} if options.score == "softmax" else {"sums of scores": 2 * each}
            kept |= _level(rule.option("over"), scores, extent)
    return kept


def _level(over: str, scores: int, extent: Extent) -> dict[str, int]:
    if over == "global_batch":
        return {"global choices": (extent.dims.num_experts + 1) * FP32}
    rows = extent.sequences if over == "sequence" else 1
    counts = rows * (extent.dims.num_experts + 2) * FP32
    return {f"rows by {over}": extent.tokens * INT64, f"mass by {over}": scores, f"counts by {over}": counts}


def _wide(extent: Extent) -> int:
    """Return the bytes of the tokens in fp32, where they are not fp32 already."""
    x = extent.tokens_given()
    wide = extent.tokens * extent.dims.model_dim * FP32
    return wide if x.nbytes < wide else 0
