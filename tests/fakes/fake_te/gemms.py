"""Both GEMMs, in fp32. The layout determines which codes they use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fake_te.signatures import bound
from fake_te.storages import Float8BlockwiseQTensorStorage, Storage

PLAIN = {"gelu": False, "accumulate": False, "bias": None}


def product(a: Storage, b: Storage, layout: str) -> Tensor:
    """Return the product of a layout."""
    assert type(a) is type(b)
    assert layout in ("TN", "NN", "NT"), f"GEMM layout {layout} not supported."
    left = b.matrix("columnwise" if layout[1] == "T" else "rowwise")
    right = a.matrix("rowwise" if layout[0] == "T" else "columnwise")
    left, right = left.mT if layout[1] == "T" else left, right.mT if layout[0] == "T" else right
    assert not any(size % 16 for size in (*left.shape, *right.shape)), "Caller must pad."
    return left @ right


@bound("general_gemm", "functions", "general_gemm")
def general_gemm(**given: Any) -> tuple[Tensor, None, None, None]:
    """Return the product, and None for the other, unsupported outputs."""
    assert {name: given[name] for name in PLAIN} == PLAIN
    assert given["quantization_params"] is given["out"] is given["ub"] is None
    return product(given["A"], given["B"], given["layout"]).to(given["out_dtype"]), None, None, None


@bound("general_grouped_gemm", "functions", "general_grouped_gemm")
def general_grouped_gemm(**given: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Write the products into one tensor, in order of groups, or into one for each group."""
    assert {name: given[name] for name in PLAIN} == PLAIN
    a, b, out, sizes = given["A"], given["B"], given["out"], given["m_splits"]
    assert isinstance(sizes, list)
    assert len(a) == len(b) == len(sizes) == len(given["quantization_params"])
    if isinstance(a[0], Float8BlockwiseQTensorStorage):
        assert given["use_split_accumulator"], "FP8 block-scaling requires split accumulator"
    outputs = out[0][: sum(sizes)].split(sizes) if given["single_output"] else out
    assert all(one.dtype is given["out_dtype"] for one in out)
    for left, right, into in zip(a, b, outputs, strict=True):
        into.copy_(product(left, right, given["layout"]))
    return out, [torch.empty(0)] * len(a), [torch.empty(0)] * len(a)
