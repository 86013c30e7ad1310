"""What a top-k router takes: the choices, the chosen scores on their way to weights, and what losses save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from moefw.ledger.parts import FP32, FP64, INT64, PartMemory, RankShape, Region, Tensor, Weight
from moefw.plugins.routers.topk.options import Options

WEIGHTS: Final = "weights"
SCORES: Final = "scores"
STATES: Final = {"expert_bias", "quantile", "aux_loss over global_batch"}
"""The rules with a number for each expert that lasts."""


def memory(options: Options, shape: RankShape) -> PartMemory | None:
    """Return weight, state and the region ``router``; None where a capacity drops choices of even routing."""
    dims, x, size = shape.dims, shape.tokens_given(), _size(options)
    capacity = _capacity(options, shape)
    if capacity is not None and capacity * dims.num_experts < shape.choices:
        return None
    scores = shape.tokens * dims.num_experts * size
    ids = Tensor(name="chosen experts", nbytes=shape.tokens * _ranked(options, shape) * INT64)
    limits = capacity is not None and capacity < shape.tokens
    counts = Tensor(name="tokens per expert", nbytes=(dims.num_experts + 1) * FP32)
    dropped = {"dropped choices": shape.choices} if limits else {}
    passing_forward, passing_backward = _passing(options, shape)
    router = Region(
        name="router",
        given=(x,),
        returns=(WEIGHTS,),
        saves=(
            *_read(options, shape),
            *_tensors(_weights(options, shape, limits=limits) | _losses(options, shape) | dropped),
            ids,
        ),
        holds=(ids, counts),
        forward_bytes=2 * scores + passing_forward,
        backward_bytes=2 * scores + passing_backward + x.nbytes,
    )
    weight = Weight(shape=(dims.num_experts, dims.model_dim), unit="root")
    return PartMemory(
        weights=(weight,),
        buffers=dims.num_experts * FP32 * len(STATES & {rule.level for rule in options.balance}),
        regions=(router,),
        filled=capacity if options.capacity is not None and options.capacity.pad else None,
    )


def _size(options: Options) -> int:
    return {"fp32": FP32, "fp64": FP64}[options.dtype]


def _ranked(options: Options, shape: RankShape) -> int:
    """Return how many experts are ranked: a quantile looks at one more, and what it chooses is a view."""
    return shape.dims.top_k + any(rule.kind == "quantile" for rule in options.balance)


def _capacity(options: Options, shape: RankShape) -> int | None:
    """Return how many choices of this rank an expert takes."""
    if options.capacity is None:
        return None
    return math.ceil(Fraction(str(options.capacity.factor)) * shape.choices / shape.dims.num_experts)


def _read(options: Options, shape: RankShape) -> tuple[Tensor, ...]:
    """Return what the gating GEMM reads; with jitter a product in the router's dtype, which saves both factors too."""
    if not options.jitter:
        return (shape.tokens_given(),)
    dims, size = shape.dims, _size(options)
    wide = shape.tokens * dims.model_dim * size
    copy = Tensor(name="copy of gate", nbytes=dims.num_experts * dims.model_dim * size, weights=True)
    return (*_tensors({"jitter": wide, "x with jitter": wide}), *((copy,) if size > FP32 else ()))


def _tensors(sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name=name, nbytes=nbytes) for name, nbytes in sizes.items())


def _weights(options: Options, shape: RankShape, *, limits: bool) -> dict[str, int]:
    """Return what weights save: values of the chosen, unless their gradient reaches all experts."""
    size = _size(options)
    if options.pre_softmax:
        return {SCORES: shape.tokens * shape.dims.num_experts * size}
    shares = options.score != "softmax" and options.renormalised(shape.dims.top_k)
    returned = options.scale == 1.0 and size == FP32 and not shares and not limits
    kept = _score(WEIGHTS if returned else "scores of the chosen", options, shape.choices * size)
    return kept | ({"their sum": shape.tokens * size} if shares else {})


def _score(name: str, options: Options, each: int) -> dict[str, int]:
    """Return what a score saves: its values, and for the root of softplus what it is the root of."""
    before = ("logits", "softplus") if options.score == "sqrtsoftplus" else ()
    return {name: each} | {f"{one} before {name}": each for one in before}


def _losses(options: Options, shape: RankShape) -> dict[str, int]:
    """Return what the losses save: shares of experts, valid tokens, and for each level the tokens' rows and mass."""
    size = _size(options)
    scores, each = shape.tokens * shape.dims.num_experts * size, shape.tokens * size
    kept: dict[str, int] = {}
    for rule in options.balance:
        if rule.kind in ("aux_loss", "z_loss"):
            kept |= {"valid tokens": each, "scale of losses": size}
        if rule.kind == "z_loss":
            kept |= {"logits": scores, "log-sum-exp of logits": each}
        if rule.kind == "aux_loss":
            kept |= _score(SCORES, options, scores)
            kept |= {} if options.score == "softmax" else {"sums of scores": 2 * each}
            kept |= _level(rule.option("over"), scores, shape)
    return kept


def _level(over: str, scores: int, shape: RankShape) -> dict[str, int]:
    if over == "global_batch":
        return {"global choices": (shape.dims.num_experts + 1) * FP32}
    rows = shape.sequences if over == "sequence" else 1
    counts = rows * (shape.dims.num_experts + 2) * FP32
    return {f"rows by {over}": shape.tokens * INT64, f"mass by {over}": scores, f"counts by {over}": counts}


def _passing(options: Options, shape: RankShape) -> tuple[int, int]:
    """Return the bytes that pass forward and backward: the tokens in a wider dtype, and the bits of their jitter."""
    x, size = shape.tokens_given(), _size(options)
    elements = shape.tokens * shape.dims.model_dim
    wide = elements * size if x.nbytes < elements * size else 0
    return wide + (3 * elements * INT64 if options.jitter else 0), 2 * wide
