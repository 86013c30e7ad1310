"""What a top-k router takes: the choices, the chosen scores on their way to weights, and what losses save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from moefw.core.ledger import FP32, INT64, Extent, PartMemory, Region, Tensor, Weight

if TYPE_CHECKING:
    from moefw.plugins.routers.topk import TopK

WEIGHTS: Final = "weights"
SCORES: Final = "scores"
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
        returns=(WEIGHTS,),
        saves=(x, *_tensors(_weights(options, extent) | _losses(options, extent)), ids),
        holds=(ids, counts),
        forward_bytes=2 * scores + _wide(extent),
        backward_bytes=2 * scores + 2 * _wide(extent) + x.nbytes,
    )
    buffers = dims.num_experts * FP32 * len({"expert_bias", "aux_loss over global_batch"} & levels)
    weight = Weight(shape=(dims.num_experts, dims.model_dim), unit="root")
    return PartMemory(weights=(weight,), buffers=buffers, regions=(router,))


def _tensors(sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name=name, nbytes=nbytes) for name, nbytes in sizes.items())


def _weights(options: TopK, extent: Extent) -> dict[str, int]:
    """Return what weights save: values of the chosen, unless their gradient reaches all experts."""
    if options.pre_softmax:
        return {SCORES: extent.tokens * extent.dims.num_experts * FP32}
    shares = options.score != "softmax" and options.renormalised(extent.dims.top_k)
    returned = options.scale == 1.0 and not shares
    kept = _score(WEIGHTS if returned else "scores of the chosen", options, extent.choices * FP32)
    return kept | ({"their sum": extent.tokens * FP32} if shares else {})


def _score(name: str, options: TopK, each: int) -> dict[str, int]:
    """Return what a score saves: its values, and for the root of softplus what it is the root of."""
    before = ("logits", "softplus") if options.score == "sqrtsoftplus" else ()
    return {name: each} | {f"{one} before {name}": each for one in before}


def _losses(options: TopK, extent: Extent) -> dict[str, int]:
    """Return what the losses save: shares of experts, valid tokens, and for each level the tokens' rows and mass."""
    scores, each = extent.tokens * extent.dims.num_experts * FP32, extent.tokens * FP32
    kept: dict[str, int] = {}
    for rule in options.balance:
        if rule.kind in ("aux_loss", "z_loss"):
            kept |= {"valid tokens": each, "scale of losses": FP32}
        if rule.kind == "z_loss":
            kept |= {"logits": scores, "log-sum-exp of logits": each}
        if rule.kind == "aux_loss":
            kept |= _score(SCORES, options, scores)
            kept |= {} if options.score == "softmax" else {"sums of scores": 2 * each}
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
