"""Finds the 8-bit and 4-bit matrix products that torch supports on a device, by multiplying ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

SIZE = 256


def fp8_products() -> tuple[str, str]:
    """Empty version, and for each device the products, in groups or not, that torch has and lacks there."""
    import torch

    by_device = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        works = {name: _works(product) for name, product in _products(device).items()}
        supported = ", ".join(name for name in works if works[name])
        unsupported = ", ".join(name for name in works if not works[name])
        sentence = f"{device} multiplies {supported or 'none'}"
        by_device.append(f"{sentence}, not {unsupported}" if unsupported else sentence)
    return "", "; ".join(by_device)


def _products(device: str) -> dict[str, Callable[[], Any]]:
    """Product of ones for each format, with scales in the layouts of the recipes' ``*_products.py``."""
    import torch
    from torch.nn.functional import ScalingType, SwizzleType

    def ones(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.ones(shape, device=device).to(dtype)

    def side(kind: Any, scale: Any, swizzle: Any = None) -> dict[str, Any]:
        return {"scale": scale, "scale_recipe": kind, "swizzle": swizzle}

    def mx(*shape: int) -> dict[str, Any]:
        return side(ScalingType.BlockWise1x32, ones(*shape, dtype=torch.float8_e8m0fnu), tiles)

    def nv(levels: tuple[int, ...], *shape: int) -> dict[str, Any]:
        scales = [ones(*shape, dtype=torch.float8_e4m3fn), ones(*levels)]
        return side([ScalingType.BlockWise1x16, tensor], scales, [tiles, SwizzleType.NO_SWIZZLE])

    tensor = ScalingType.TensorWise
    row = ScalingType.RowWise
    tiles = SwizzleType.SWIZZLE_32_4_4
    eight = ones(SIZE, SIZE, dtype=torch.float8_e4m3fn)
    four = torch.full((SIZE, SIZE // 2), 0x22, dtype=torch.uint8, device=device).view(torch.float4_e2m1fn_x2)
    ends = torch.tensor([SIZE // 2, SIZE], dtype=torch.int32, device=device)
    by_32 = SIZE // 32
    by_16 = SIZE // 16
    by_128 = SIZE // 128
    per_row = ones(by_128, SIZE).mT
    square = ones(by_128, 4).mT
    sides: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Any]] = {
        "tensor": (eight, side(tensor, ones()), side(tensor, ones()), None),
        "row": (eight, side(row, ones(SIZE, 1)), side(row, ones(1, SIZE)), None),
        "fp8-blockwise": (
            eight, side(ScalingType.BlockWise1x128, per_row), side(ScalingType.BlockWise128x128, square), None
        ),
        "mxfp8": (eight, mx(SIZE * by_32), mx(SIZE * by_32), None),
        "mxfp8 in groups": (eight, mx(SIZE, by_32), mx(len(ends), SIZE * by_32), ends),
        "nvfp4": (four, nv((), SIZE * by_16), nv((), SIZE * by_16), None),
        "nvfp4 in groups": (four, nv((len(ends),), SIZE, by_16), nv((len(ends),), len(ends), SIZE * by_16), ends),
    }  # fmt: skip
    return {name: partial(_product, *operands) for name, operands in sides.items()}


def _product(codes: Any, rows: dict[str, Any], columns: dict[str, Any], ends: Any) -> Any:
    """Product of two matrices of ones; with ``ends``, of groups of rows and a matrix for each."""
    import torch
    from torch.nn import functional as F

    scales = {f"{name}_a": value for name, value in rows.items()} | {
        f"{name}_b": value for name, value in columns.items()
    }
    if ends is None:
        return F.scaled_mm(codes, codes.mT, **scales)
    weights = codes.view(torch.uint8).expand(len(ends), *codes.shape).clone().view(codes.dtype)
    return F.scaled_grouped_mm(codes, weights.mT, **scales, offs=ends)  # type: ignore[attr-defined]


def _works(product: Callable[[], Any]) -> bool:
    try:
        return bool((product() == SIZE).all())
    except (RuntimeError, ValueError):
        return False
