"""What a Sinkhorn router takes: the scores of all experts, the choices, and what the loss on logits saves."""

from __future__ import annotations

from typing import Final

from moefw.ledger.parts import FP32, FP64, INT64, Extent, PartMemory, Region, Tensor, Weight

SIZES: Final = {"fp32": FP32, "fp64": FP64}


def memory(extent: Extent, *, dtype: str, z_loss: float) -> PartMemory:
    """Return weight and the region ``router``: the gradient of a chosen score reaches the scores of all experts."""
    dims, x, size = extent.dims, extent.tokens_given(), SIZES[dtype]
    scores, each = extent.tokens * dims.num_experts * size, extent.tokens * size
    wide = 0 if x.nbytes == extent.tokens * dims.model_dim * size else extent.tokens * dims.model_dim * size
    ids = Tensor(name="chosen experts", nbytes=extent.choices * INT64)
    saved = {"scores": scores, "experts found": ids.nbytes, "absent": extent.choices}
    if z_loss:
        saved |= {"logits": scores, "log-sum-exp of logits": each, "valid tokens": each, "scale of losses": size}
    router = Region(
        name="router",
        given=(x,),
        returns=("weights",),
        saves=(x, *(Tensor(name=name, nbytes=nbytes) for name, nbytes in saved.items())),
        holds=(ids, Tensor(name="tokens per expert", nbytes=(dims.num_experts + 1) * FP32)),
        forward_bytes=max(scores + wide, 4 * scores),
        backward_bytes=2 * scores + 2 * wide + x.nbytes,
    )
    return PartMemory(weights=(Weight(shape=(dims.num_experts, dims.model_dim), unit="root"),), regions=(router,))
