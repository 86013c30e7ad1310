"""Which FP8 formats torch multiplies on a device, found out by multiplying ones."""

from __future__ import annotations

from typing import Any

SIZE = 256


def fp8_products() -> tuple[str, str]:
    """Return no version, and for each device what ``torch.nn.functional.scaled_mm`` multiplies there and what not."""
    import torch

    said = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        works = {name: _works(device, *scaling) for name, scaling in _scalings(device).items()}
        does, does_not = (", ".join(name for name in works if works[name] is wanted) for wanted in (True, False))
        said.append(f"{device} multiplies {does or 'none'}" + (f", not {does_not}" if does_not else ""))
    return "", "; ".join(said)


def _scalings(device: str) -> dict[str, tuple[Any, Any, Any]]:
    """Return by format: how the two sides are scaled, and how the scales lie; see ``scaled_mm.py`` of the recipes."""
    import torch
    from torch.nn.functional import ScalingType, SwizzleType

    def ones(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.ones(shape, device=device).to(dtype)

    blocks = SIZE // 128
    tensor, row = (ones(), ScalingType.TensorWise), ScalingType.RowWise
    per_row, square = (ones(blocks, SIZE).mT, ScalingType.BlockWise1x128), ScalingType.BlockWise128x128
    per_32 = ones(SIZE * SIZE // 32, dtype=torch.float8_e8m0fnu), ScalingType.BlockWise1x32
    return {
        "tensor": (tensor, tensor, None),
        "row": ((ones(SIZE, 1), row), (ones(1, SIZE), row), None),
        "fp8-blockwise": (per_row, (ones(blocks, 4).mT, square), None),
        "mxfp8": (per_32, per_32, SwizzleType.SWIZZLE_32_4_4),
    }


def _works(device: str, rows: Any, columns: Any, swizzle: Any) -> bool:
    import torch
    from torch.nn.functional import scaled_mm

    codes = torch.ones(SIZE, SIZE, device=device).to(torch.float8_e4m3fn)
    try:
        (scale_a, a), (scale_b, b) = rows, columns
        found = scaled_mm(codes, codes.mT, scale_a, a, scale_b, b, swizzle_a=swizzle, swizzle_b=swizzle)
    except (RuntimeError, ValueError):
        return False
    return bool((found == SIZE).all())
