"""What grouped experts take: they save the rows X and the pre-activation H, and compute the activation again.

Shapes: legend in :mod:`moefw.core.stages`; H = 2F.
"""

from __future__ import annotations

from moefw.ledger.parts import FP32, PartMemory, RankShape, Region, Weight

EXPERTS = "moe.experts"


def memory(shape: RankShape) -> PartMemory:
    """Return the weights and the two regions of a layer.

    In ``expert_fc2``, ``weighted_swiglu_backward`` has at its worst the gradients of Y and of the activation, silu(g),
    its product with u, and fp32 copies of the last two factors of the weights' gradient with their product; where
    rows are fp32 already, rather its seven factors of width F at the end.
    """
    dims, formats = shape.dims, shape.formats_of(EXPERTS)
    d, f, e, r, b = dims.model_dim, dims.expert_dim // shape.etp, shape.local_experts, shape.rows, formats.stream
    rows, row_weights, ends = shape.rows_given()
    about = (ends, *shape.keys_given())
    h = shape.matrix("pre-activation", 2 * f)
    w13 = shape.weight_copy("gate_up", e * 2 * f * d, EXPERTS, "experts")
    w2 = shape.weight_copy("down", e * f * d, EXPERTS, "experts")
    out, activation = r * d * b, r * f * b
    factors = r * f * (3 * b + 3 * FP32) if b < FP32 else r * f * 7 * b
    fc1 = Region(
        name="expert_fc1",
        given=(rows, *about),
        returns=(h.name,),
        saves=(*formats.kept_input("gate_up", rows, r, d, shared=True), *about, *w13),
        weight_elements=e * 2 * f * d,
        backward_bytes=2 * activation + out + _gradient(shape, e * 2 * f * d),
    )
    fc2 = Region(
        name="expert_fc2",
        given=(h, row_weights, *about),
        saves=(*formats.kept_activation(h, r, 2 * f, shared=True), row_weights, *about, *w2),
        forward_bytes=out + 2 * activation,
        weight_elements=e * f * d,
        backward_bytes=max(out + factors, out + 3 * activation + _gradient(shape, e * f * d)),
    )
    shapes = ((e, 2 * f, d), (e, d, f))
    weights = tuple(Weight(shape=size_of, unit="experts", side="experts") for size_of in shapes)
    return PartMemory(weights=weights, buffers=2 * e * formats.state, regions=(fc1, fc2))


def _gradient(shape: RankShape, elements: int) -> int:
    """Return the bytes of a weight's gradient as it is computed, and its fp32 copy where FSDP does not reduce it."""
    computed = shape.formats_of(EXPERTS).gathered
    copied = FP32 if computed < FP32 and shape.shards["experts"] == 1 else 0
    return elements * (computed + copied)
