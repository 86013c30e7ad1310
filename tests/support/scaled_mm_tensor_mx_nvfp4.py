"""``scaled_mm`` and ``scaled_grouped_mm`` as they multiply tensorwise FP8, MXFP8 and NVFP4, for a machine without the GPU.

Every call is bound to the real signature and goes through torch's own checks, if any, on fake tensors of a GPU. Further
checks of the CUDA code are repeated here. Scales are read from their tiles by the formula of cuBLAS, those of groups
from the places that the kernels of FBGEMM read. Elements that no kernel writes are NaN.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from scaled_mm_of_hopper import on_a_gpu

MM, GROUPED_MM = F.scaled_mm, F.scaled_grouped_mm
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TENSOR, MX = (ScalingType.TensorWise,), (ScalingType.BlockWise1x32,)
NVFP4 = (ScalingType.BlockWise1x16, ScalingType.TensorWise)
TILES = SwizzleType.SWIZZLE_32_4_4


@dataclass
class Side:
    """One operand of a call, its codes in rows along the summed axis: (..., rows, K)."""

    codes: Tensor
    scales: list[Tensor]
    recipe: tuple[ScalingType, ...]
    swizzles: list[SwizzleType]

    def __post_init__(self) -> None:
        assert self.codes.stride(-1) == 1
        assert self.codes.stride(-2) >= self.codes.shape[-1]
        assert self.codes.stride(-2) % 16 == 0, "TMA loads rows that begin at multiples of 16 bytes"
        if self.recipe == TENSOR:
            assert self.swizzles == []
            return
        assert self.swizzles == ([TILES] if self.recipe == MX else [TILES, SwizzleType.NO_SWIZZLE])
        assert self.scales[0].is_contiguous()
        assert self.scales[0].dtype is (torch.float8_e8m0fnu if self.recipe == MX else torch.float8_e4m3fn)
        assert self.codes.dtype is (torch.float8_e4m3fn if self.recipe == MX else torch.float4_e2m1fn_x2)

    @property
    def block(self) -> int:
        return 32 if self.recipe == MX else 16

    @property
    def numbers(self) -> Tensor:
        """Return the codes as fp32 numbers."""
        if self.codes.dtype is not torch.float4_e2m1fn_x2:
            return self.codes.float()
        two = self.codes.view(torch.uint8)
        each = torch.stack([two & 15, two >> 4], -1).flatten(-2).long()
        return E2M1[each & 7] * (1 - 2 * (each >> 3)).float()

    def scaled(self, numbers: Tensor, first: int) -> tuple[Tensor, int]:
        """Return numbers (rows, K) times the scales of blocks, which begin at byte ``first``, and the first byte after them."""
        rows, count = numbers.shape[0], numbers.shape[1] // self.block
        size = -(-rows // 128) * -(-count // 4) * 512
        tiles = self.scales[0].view(torch.uint8).flatten()[first : first + size]
        assert len(tiles) == size
        r, c = torch.arange(rows).unsqueeze(1), torch.arange(count).unsqueeze(0)
        at = (r // 128 * -(-count // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        unused = tiles.clone()
        unused[at] = 0
        assert not unused.any(), "what pads a tile would multiply zeros, and must not be NaN"
        found = tiles[at]
        values = (found.float() - 127).exp2() if self.recipe == MX else found.view(torch.float8_e4m3fn).float()
        return numbers * values.repeat_interleave(self.block, 1), first + size


class OtherGpus:
    """Replaces both functions; ``calls`` lists the function, the recipe and the result's dtype of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[ScalingType, ...], torch.dtype]] = []

    def scaled_mm(self, *args: Any, **kwargs: Any) -> Tensor:
        given, a, b = self._sides("mm", MM, args, kwargs)
        (m, _), n, dtype = a.codes.shape, b.codes.shape[0], given["output_dtype"]
        assert a.codes.numel()
        assert b.codes.numel()
        checked = meta(MM, given)
        assert (checked.shape, checked.dtype) == ((m, n), dtype)
        if a.recipe == TENSOR:
            kinds = {a.codes.dtype, b.codes.dtype}
            assert kinds <= {torch.float8_e4m3fn, torch.float8_e5m2}
            assert kinds != {torch.float8_e5m2}, "cuBLAS multiplies no two matrices of E5M2"
            return (a.codes.float() @ b.codes.float().T * a.scales[0] * b.scales[0]).to(dtype)
        (left, end_a), (right, end_b) = a.scaled(a.numbers, 0), b.scaled(b.numbers, 0)
        assert (end_a, end_b) == (a.scales[0].numel(), b.scales[0].numel())
        product = left @ right.T
        return (product if a.recipe == MX else product * (a.scales[1] * b.scales[1])).to(dtype)

    def scaled_grouped_mm(self, *args: Any, **kwargs: Any) -> Tensor:
        given, a, b = self._sides("grouped", GROUPED_MM, args, kwargs)
        offs = given["offs"]
        assert given["output_dtype"] is torch.bfloat16
        assert a.recipe in (MX, NVFP4), "E4M3 alone has a scale for each row"
        assert (offs.dtype, offs.ndim) == (torch.int32, 1)
        assert all(size % 16 == 0 for size in (a.codes.shape[-1], b.codes.shape[-1], b.codes.shape[-2]))
        assert a.codes.shape[-1] == b.codes.shape[-1]
        assert a.scales[0].ndim == 2
        if a.recipe == MX:
            with FakeTensorMode():
                names = ("mat_a", "mat_b", "scale_a", "scale_b", "offs")
                tensors = [on_a_gpu(given[name]) for name in names]
                torch._scaled_grouped_mm(*tensors, out_dtype=torch.bfloat16)
        else:
            levels = a.scales[1] * b.scales[1]
            assert levels.shape == offs.shape
            assert levels.is_contiguous()
        ends = offs.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends)]
        found = self._over_rows(a, b, groups) if b.codes.ndim == 2 else self._rows_by_weights(a, b, groups)
        return found.bfloat16()

    def _rows_by_weights(self, a: Side, b: Side, groups: list[slice]) -> Tensor:
        rows, count = b.codes.shape[-2], b.numbers.shape[-1] // b.block
        assert b.scales[0].shape == (len(groups), -(-rows // 128) * 128 * -(-count // 4) * 4)
        out, at = torch.full((len(a.codes), rows), torch.nan), [0, 0]
        assert len(a.scales[0]) >= len(a.codes)
        for group, part in enumerate(groups):
            left, at[0] = a.scaled(a.numbers[part], at[0])
            right, at[1] = b.scaled(b.numbers[group], at[1])
            out[part] = left @ right.T * self._level(a, b, group)
        return out

    def _over_rows(self, a: Side, b: Side, groups: list[slice]) -> Tensor:
        out, at = torch.full((len(groups), len(a.codes), len(b.codes)), torch.nan), [0, 0]
        for side in (a, b):
            assert len(side.scales[0]) >= len(side.codes)
        for group, part in enumerate(groups):
            assert (part.stop - part.start) % 32 == 0, "blocks of 32, and 16 bytes"
            left, at[0] = a.scaled(a.numbers[:, part], at[0])
            right, at[1] = b.scaled(b.numbers[:, part], at[1])
            if part.stop > part.start:
                out[group] = left @ right.T * self._level(a, b, group)
        return out

    def _level(self, a: Side, b: Side, group: int) -> float:
        return 1.0 if a.recipe == MX else float(a.scales[1][group] * b.scales[1][group])

    def _sides(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Side, Side]:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        assert not given["use_fast_accum"]
        assert (given["bias"], given["contraction_dim"]) == (None, ())
        sides = []
        for side in "ab":
            codes = given[f"mat_{side}"] if side == "a" else given["mat_b"].mT
            scales, recipe, swizzle = (listed(given[f"{what}_{side}"]) for what in ("scale", "scale_recipe", "swizzle"))
            sides.append(Side(codes, scales, tuple(recipe), swizzle))
        assert sides[0].recipe == sides[1].recipe
        self.calls.append((name, sides[0].recipe, given["output_dtype"]))
        return given, sides[0], sides[1]


def listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def meta(function: Any, given: dict[str, Any]) -> Tensor:
    """Return the result of torch's own checks, a fake tensor."""
    with FakeTensorMode():
        moved = dict(given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                moved[name] = on_a_gpu(value)
            elif isinstance(value, list) and isinstance(value[0], Tensor):
                moved[name] = [on_a_gpu(tensor) for tensor in value]
        result: Tensor = function(**moved)
        return result
