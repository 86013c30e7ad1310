"""NVFP4 operands: blocks, keys of random rounding, and the Hadamard transform before quantizing."""

from __future__ import annotations

import hashlib
from typing import final

from torch import Tensor
from torch.nn import functional as F

from moefw.core.records import GemmPass, Role, RowGroups
from moefw.plugins.precision.quantized.encoders import Encoder, summed_axis
from moefw_kernels.hadamard import SIZE
from moefw_kernels.quantize import BlockScales, Quantized, matrix_amax, quantize_nvfp4, quantize_nvfp4_both
from moefw_kernels.random import operand_keys


@final
class FourBits(Encoder):
    """E2M1 in blocks of 16 along the summed axis, weights in 16x16 if ``square_weights``.

    ``draws``: gradients are rounded at random, with separate keys for each ``place`` (``layers.3.attention.q_proj``)
    and pass. ``turns``: the operands of wgrad are Hadamard-transformed along their rows. ``drawn_scales``: how the
    scales of what is rounded at random are rounded.
    """

    def __init__(
        self, place: str, *, draws: bool, turns: bool, square_weights: bool, drawn_scales: BlockScales = "nearest"
    ) -> None:
        self._place = place
        self.draws = draws
        self._turns = turns
        self.square_weights = square_weights
        self._drawn_scales: BlockScales = drawn_scales

    def at(self, name: str, *, groups: int | None = None) -> Encoder:
        """Encoder of a module or a GEMM inside."""
        place = f"{self._place}.{name}"
        return FourBits(
            place,
            draws=self.draws,
            turns=self._turns,
            square_weights=self.square_weights,
            drawn_scales=self._drawn_scales,
        )

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand. The rows of a transformed operand are padded with zeros to a multiple of 16."""
        block = (1, SIZE) if summed_axis(role, during) == -1 else (SIZE, 1)
        if role == "weight":
            if self.square_weights:
                block = (SIZE, SIZE)
            return quantize_nvfp4(x, block=block, global_amax=matrix_amax(x))
        turns = self._turns and during == "wgrad"
        keys_R = None
        if self.draws and role == "grad" and rows.keys_R is not None:
            # A turned row mixes 16. The first is never padding, whose key is 0 in every group.
            keys_R = operand_keys(rows.keys_R, salt(f"{self._place}.{during}"), size=SIZE if turns else 1)
        missing = -x.shape[-2] % SIZE
        if turns and missing:
            x = F.pad(x, (0, 0, 0, missing))
        scales: BlockScales = "nearest" if keys_R is None else self._drawn_scales
        return quantize_nvfp4(x, block=block, keys=keys_R, ends_e=rows.ends_e, scales=scales, hadamard=turns)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Operands of a weight in squares. Rows are transformed, or drawn anew, for the sum across them."""
        if role == "weight" and self.square_weights:
            return quantize_nvfp4_both(x, global_amax=matrix_amax(x))
        return None


def salt(place: str) -> int:
    """64 bits that are unique to a place."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little", signed=True)
