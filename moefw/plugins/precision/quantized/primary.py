"""FP8 primary weights: shards of fp32 masters as E4M3 codes in blocks of 128x128, and operands of the gathered codes.

A block of a shard is a block of the whole weight, so codes and scales equal those of the gathered fp32 weight bit for
bit. With square blocks they are the operand of fprop and, transposed, of dgrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from moefw.core.contracts import WeightCodec
from moefw.core.errors import PlanError
from moefw.runtime.compute.primary_weights import GatheredWeight
from moefw_kernels.quantize import E4M3, Quantized, quantize_fp8

BLOCK: Final = (128, 128)
_FIX: Final = "Shard over fewer ranks, leave the module out with keep_bf16, or use primary_weights: fp32."


@final
class SquareBlocks(WeightCodec):
    """E4M3 with an fp32 scale per 128x128 values."""

    rows = BLOCK[0]

    def __init__(self, *, power_of_two: bool) -> None:
        self._power_of_two = power_of_two

    def require(self, weight: str, shape: Sequence[int], shards: int) -> None:
        """Raise PlanError unless each shard of the weight, or of a stack of them, consists of whole blocks."""
        *stacked, rows, columns = shape
        name = f"primary_weights: fp8: {weight} is {'x'.join(map(str, shape))}"
        if stacked:
            # A stack is sharded by expert, so that a shard has whole matrices.
            if stacked[0] % shards:
                raise PlanError(
                    f"{name}, and {shards} ranks cannot shard {stacked[0]} experts evenly.",
                    f"Use gemm: loop. Or: {_FIX}",
                )
            if rows % BLOCK[0] or columns % BLOCK[1]:
                raise PlanError(f"{name}: no whole blocks of 128x128.", _FIX)
        elif rows % shards or rows // shards % BLOCK[0] or columns % BLOCK[1]:
            raise PlanError(f"{name}: no whole blocks of 128x128 for each of {shards} ranks.", _FIX)

    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales."""
        encoded = quantize_fp8(shard, block=BLOCK, power_of_two=self._power_of_two)
        return encoded.codes.contiguous(), encoded.scales.contiguous()


def quantized_weight(weight: GatheredWeight) -> Quantized:
    """Gathered codes and scales as an operand."""
    codes, scales = weight.parts
    return Quantized(codes=codes, scales=scales, fmt=E4M3, block=BLOCK, axis=-1, shape=tuple(weight.shape))
