"""``torch.nn.functional.scaled_mm`` as on Hopper, for a machine without one.

Every call is bound to the real signature and goes through torch's own checks, on fake tensors of a GPU.
Its result is computed block by block, as these products are defined.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.functional import ScalingType

REAL = F.scaled_mm
ROW, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


class Hopper:
    """Replaces ``scaled_mm``; ``calls`` lists the blocks and the dtype of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[ScalingType, torch.dtype]] = []

    def scaled_mm(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(REAL).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        a, b, scale_a, scale_b = (given[name] for name in ("mat_a", "mat_b", "scale_a", "scale_b"))
        blocks, dtype = given["scale_recipe_b"], given["output_dtype"]
        self.calls.append((blocks, dtype))
        assert given["scale_recipe_a"] is ROW
        assert blocks in (ROW, SQUARE)
        assert dtype in (torch.bfloat16, torch.float32)
        assert not given["use_fast_accum"], "refused for these blocks: get_scale_mode in CUDABlas.cpp"
        assert (given["swizzle_a"], given["swizzle_b"], given["bias"]) == (None, None, None)
        with FakeTensorMode():
            for name in ("mat_a", "mat_b", "scale_a", "scale_b"):
                given[name] = on_a_gpu(given[name])
            checked = REAL(*bound.args, **bound.kwargs)
        (m, k), n = a.shape, b.shape[1]
        assert m * k * n, "there is nothing to multiply"
        assert k % 128 == 0
        scales_b = scale_b[: k // 128].T.repeat_interleave(128, 0) if blocks is SQUARE else scale_b
        out = torch.zeros(m, n)
        for block in range(k // 128):
            at = slice(block * 128, block * 128 + 128)
            scales = scale_a[:, block].unsqueeze(1) * scales_b[:, block].unsqueeze(0)
            out += a[:, at].float() @ b[at].float() * scales
        assert (checked.shape, checked.dtype) == (out.shape, dtype)
        return out.to(dtype)


def on_a_gpu(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
