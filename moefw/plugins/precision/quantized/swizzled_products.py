"""MXFP8 and NVFP4 products of torch on Blackwell: scales in tiles of 128x4, with separate tiles for each group.

``_scaled_mxfp8_mxfp8`` and ``_scaled_nvfp4_nvfp4`` in ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` of torch (read at
0174dfa), ``_scaled_grouped_mm_cuda_v2`` in ``GroupedBlas.cpp`` (00d4eaf), where kernels of FBGEMM, later of MSLK,
multiply. ``a`` (M, K) is row-major and ``b`` (K, N) column-major. A row of codes is a multiple of 16 bytes, which hold
32 values of NVFP4. The same holds for each group where K is divided into groups. A block of MXFP8 has 32 values.

Results of groups are bf16, even where fp32 is wanted, and nothing is written for a group without rows. A group of NVFP4
has one scale above those of blocks: the product of the scales of its rows and of its weights.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from moefw.plugins.precision.quantized.gpus import MXFP8, NVFP4, Gpus
from moefw.plugins.precision.quantized.products import Products
from moefw_kernels.quantize import Quantized
from moefw_kernels.swizzle import swizzle


class SwizzledProducts(Products):
    """Blocks of 1 x ``block`` along the summed axis."""

    multiple: ClassVar[int] = 32
    block: ClassVar[int]

    @abstractmethod
    def codes_of(self, operand: Quantized) -> Tensor:
        """Codes in the form that torch takes."""

    @abstractmethod
    def scaling(self, tiles: Tensor, operand: Quantized, ends_e: Tensor | None) -> dict[str, Any]:
        """Torch's arguments for the scales: ``scale``, ``scale_recipe`` and ``swizzle``.

        ``ends_e``: ends of the operand's groups; None without groups.
        """

    def mm(self, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.mm``."""
        scaling = self._scaling_of_both(a, b, tiles=(swizzle(_scales(a)), swizzle(_scales(b.mT))), ends=(None, None))
        return F.scaled_mm(self.codes_of(a), self.codes_of(b), **scaling, output_dtype=out_dtype)

    def grouped_mm(self, a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.grouped_mm``."""
        if len(b.shape) == 3:
            tiles = (swizzle(_scales(a), ends=ends_e), swizzle(_scales(b.mT)))
            scaling = self._scaling_of_both(a, b, tiles=tiles, ends=(ends_e, None))
            return self._grouped(a, b, ends_e, scaling).to(out_dtype)
        # Groups end along the axis that is summed over, of which a block of scales is one column.
        block_ends_e = ends_e // self.block
        tiles = (swizzle(_scales(a), ends=block_ends_e, axis=-1), swizzle(_scales(b.mT), ends=block_ends_e, axis=-1))
        scaling = self._scaling_of_both(a, b, tiles=tiles, ends=(ends_e, ends_e))
        out_eOI = self._grouped(a, b, ends_e, scaling)
        # Nothing has been written for groups without rows.
        has_rows_e = ends_e.diff(prepend=ends_e.new_zeros(1)) > 0
        return out_eOI.to(out_dtype).where(has_rows_e[:, None, None], 0)

    def _grouped(self, a: Quantized, b: Quantized, ends_e: Tensor, scaling: dict[str, Any]) -> Tensor:
        """Product of groups in bf16."""
        product: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
            self.codes_of(a), self.codes_of(b), **scaling, offs=ends_e, output_dtype=torch.bfloat16
        )
        return product

    def _scaling_of_both(
        self, a: Quantized, b: Quantized, *, tiles: tuple[Tensor, Tensor], ends: tuple[Tensor | None, Tensor | None]
    ) -> dict[str, Any]:
        """Torch's arguments for the scales of both operands: ``scale_a``, ``scale_b``, and so on."""
        arguments = {}
        for side, operand, operand_tiles, ends_e in zip("ab", (a, b), tiles, ends, strict=True):
            for name, value in self.scaling(operand_tiles, operand, ends_e).items():
                arguments[f"{name}_{side}"] = value
        return arguments


@final
class MXProducts(SwizzledProducts):
    """E4M3 in blocks of 32, E8M0 scales."""

    gpus: ClassVar[Gpus] = MXFP8
    block: ClassVar[int] = 32

    def codes_of(self, operand: Quantized) -> Tensor:
        """See ``SwizzledProducts.codes_of``."""
        return operand.codes

    def scaling(self, tiles: Tensor, operand: Quantized, ends_e: Tensor | None) -> dict[str, Any]:
        """See ``SwizzledProducts.scaling``."""
        return {"scale": tiles, "scale_recipe": ScalingType.BlockWise1x32, "swizzle": SwizzleType.SWIZZLE_32_4_4}


@final
class NVFP4Products(SwizzledProducts):
    """E2M1 in blocks of 16, two codes per byte, E4M3 scales and a second-level fp32 scale."""

    gpus: ClassVar[Gpus] = NVFP4
    block: ClassVar[int] = 16

    def codes_of(self, operand: Quantized) -> Tensor:
        """See ``SwizzledProducts.codes_of``."""
        return operand.codes.view(torch.float4_e2m1fn_x2)

    def scaling(self, tiles: Tensor, operand: Quantized, ends_e: Tensor | None) -> dict[str, Any]:
        """See ``SwizzledProducts.scaling``."""
        level = operand.global_scale
        assert level is not None
        return {
            "scale": [tiles, level if ends_e is None else _of_groups(level, operand, ends_e)],
            "scale_recipe": [ScalingType.BlockWise1x16, ScalingType.TensorWise],
            "swizzle": [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
        }


def _scales(operand: Quantized) -> Tensor:
    """Scales of an operand whose last axis is summed over, one per row. Square blocks repeat theirs."""
    assert operand.block is not None
    rows = operand.block[0]
    if rows == 1:
        return operand.scales
    repeated = operand.scales.view(torch.uint8).repeat_interleave(rows, -2)
    return repeated.view(operand.scales.dtype)


def _of_groups(level: Tensor, operand: Quantized, ends_e: Tensor) -> Tensor:
    """Scale of each group, taken from its first block of rows; any scale for a group without rows."""
    assert operand.block is not None
    # One number for each row of blocks (n, 1), or in a transpose for each column of blocks (1, n).
    step = operand.block[1] if level.shape[-1] > 1 else operand.block[0]
    starts_e = F.pad(ends_e, (1, 0))[:-1] // step
    return level.flatten()[starts_e.clamp(max=level.numel() - 1)]
