"""What a SwiGLU takes on one rank of tp: a dense MLP or a shared expert."""

from __future__ import annotations

from moefw.ledger.parts import FP32, RankShape, Region, Tensor, Weight
from moefw.models.sizes import Sizes


def mlp(
    name: str, hidden_dim: int, options: Sizes, shape: RankShape, *, module: str, unit: str
) -> tuple[Region, list[Weight]]:
    """Return the region and its weights: autograd saves gate, silu(gate), up and their product, and what is read."""
    formats, size, tokens = shape.formats_of(module), hidden_dim // shape.tp, shape.all_tokens
    b, d = formats.stream, options.dim
    given = Tensor(name="x", nbytes=shape.tokens * d * b)
    x = given if shape.tp == 1 else Tensor(name=f"gathered x of {name}", nbytes=tokens * d * b)
    gate, silu, up, product = (
        Tensor(name=f"{part} of {name}", nbytes=tokens * size * b) for part in ("gate", "silu", "up", "product")
    )
    reads = formats.kept_inputs([f"{name} {reader}" for reader in ("gate", "up")], x, tokens, d)
    into = tuple(
        copy for part in ("gate", "up", "down") for copy in shape.weight_copy(f"{name} {part}", size * d, module)
    )
    gradient = size * d * (formats.gathered + (FP32 if formats.gathered < FP32 and shape.shards["dense"] == 1 else 0))
    region = Region(
        name=name,
        unit=unit,
        given=(given,),
        saves=(*reads, gate, silu, up, *formats.kept_input(f"{name} down", product, tokens, size), *into),
        forward_bytes=2 * x.nbytes,
        leaves_bytes=given.nbytes,
        weight_elements=3 * size * d,
        backward_bytes=2 * x.nbytes + 3 * gate.nbytes + gradient,
    )
    weights = [Weight(shape=size_of, unit=unit, split=True) for size_of in ((size, d), (size, d), (d, size))]
    return region, weights
