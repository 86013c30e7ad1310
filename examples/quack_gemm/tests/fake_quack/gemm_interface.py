"""``quack.gemm_interface`` in plain PyTorch.

Products are summed in fp32. Rows outside of the groups are not read; results there are NaN, as QuACK leaves them
unwritten. No value is read on the host. Assertions are those of ``quack/gemm.py`` and of the copies by TMA, which begin
rows on 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fake_quack.signatures import of_the_library
from torch import Tensor

Layout = Sequence[str] | None


@of_the_library
def gemm(
    A: Tensor,
    B: Tensor,
    out: Tensor | None,
    cu_seqlens_m: Tensor | None,
    cu_seqlens_k: Tensor | None,
    concat_layout: Layout,
    tuned: bool,
) -> Tensor:
    """Products of groups of rows with B ``(L, K, N)``, or sums over groups of columns of A, ``(L, M, N)``."""
    _require_untuned(tuned)
    if cu_seqlens_k is None:
        assert out is None
        return _over_rows(A, B, cu_seqlens_m, concat_layout).to(A.dtype)
    assert cu_seqlens_m is None
    assert out is not None
    return out.copy_(_over_columns(A, B, cu_seqlens_k, concat_layout))


@of_the_library
def gemm_add_inplace(
    A: Tensor, B: Tensor, out: Tensor, cu_seqlens_k: Tensor, concat_layout: Layout, tuned: bool
) -> None:
    """Add sums over groups of columns of A to ``out``. C is another name of it."""
    _require_untuned(tuned)
    assert not concat_layout or {*concat_layout} == {"C", "out"}
    out.add_(_over_columns(A, B, cu_seqlens_k, concat_layout))


@of_the_library
def gemm_gated(
    A: Tensor, B: Tensor, activation: str, cu_seqlens_m: Tensor, concat_layout: Layout, tuned: bool
) -> tuple[Tensor, Tensor]:
    """Pre-activation, with gate and up in turn, and ``silu(gate) * up`` of what is not rounded yet."""
    assert activation == "swiglu"
    _require_untuned(tuned)
    preact = _over_rows(A, B, cu_seqlens_m, concat_layout)
    gate, up = preact[:, ::2], preact[:, 1::2]
    return preact.to(A.dtype), (torch.nn.functional.silu(gate) * up).to(A.dtype)


@of_the_library
def gemm_dgated(
    A: Tensor,
    B: Tensor,
    PreAct: Tensor,
    activation: str,
    colvec_scale: Tensor,
    colvec_reduce: bool,
    cu_seqlens_m: Tensor,
    tuned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation, ``s * act``, and the sum of ``act`` times the gradient before it is scaled."""
    assert activation == "swiglu"
    assert colvec_reduce
    assert (colvec_scale.dtype, colvec_scale.shape) == (torch.float32, A.shape[:1])
    _require_untuned(tuned)
    dout = _over_rows(A, B, cu_seqlens_m, None)
    scale = colvec_scale.unsqueeze(1)
    gate, up = PreAct[:, ::2].float(), PreAct[:, 1::2].float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dgate = dout * scale * up * (sigmoid + silu * (1 - sigmoid))
    dup = dout * scale * silu
    dx = torch.stack([dgate, dup], dim=-1).flatten(-2)
    return dx.to(A.dtype), (silu * up * scale).to(PreAct.dtype), (silu * up * dout).sum(1)


def _over_rows(A: Tensor, B: Tensor, cu_seqlens: Tensor | None, concat_layout: Layout) -> Tensor:
    """``(R, N)`` in fp32, NaN outside of the groups."""
    assert cu_seqlens is not None
    assert A.stride(-1) == 1, "varlen_m requires A to be k-major"
    _require_operands(A, B, cu_seqlens, groups=len(B))
    if concat_layout:
        assert tuple(concat_layout) == ("B",)
        B = _in_turn(B)
    product = torch.full((len(A), B.shape[-1]), torch.nan)
    for is_member, weight in zip(_members(cu_seqlens, len(A)), B):
        product = torch.where(is_member.unsqueeze(1), A.float() @ weight.float(), product)
    return product


def _over_columns(A: Tensor, B: Tensor, cu_seqlens: Tensor, concat_layout: Layout) -> Tensor:
    """``(L, M, N)`` in fp32."""
    assert A.stride(-2) == 1, "varlen_k requires A to be m-major"
    assert B.stride(-1) == 1, "varlen_k requires B to be n-major"
    _require_operands(A, B, cu_seqlens, groups=len(cu_seqlens) - 1)
    sums = [
        torch.where(is_member, A.float(), 0) @ torch.where(is_member.unsqueeze(1), B.float(), 0)
        for is_member in _members(cu_seqlens, len(B))
    ]
    product = torch.stack(sums)
    if not concat_layout:
        return product
    assert "out" in concat_layout
    return torch.cat([product[:, ::2], product[:, 1::2]], dim=1)


def _in_turn(x: Tensor) -> Tensor:
    """``x`` with the halves of the dimension that is not contiguous, one value of each in turn."""
    dim = -2 if x.stride(-1) == 1 else -1
    halves = x.unflatten(dim, (2, -1))
    return halves.transpose(dim - 1, dim).flatten(dim - 1, dim)


def _members(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Which rows are in each group, bool ``(L, R)``."""
    row = torch.arange(rows)
    return (cu_seqlens[:-1].unsqueeze(1) <= row) & (row < cu_seqlens[1:].unsqueeze(1))


def _require_operands(A: Tensor, B: Tensor, cu_seqlens: Tensor, *, groups: int) -> None:
    assert A.dtype is B.dtype
    assert A.dtype in (torch.bfloat16, torch.float16)
    assert (cu_seqlens.dtype, cu_seqlens.shape) == (torch.int32, (groups + 1,))
    for operand in (A, B):
        strides = [stride for size, stride in zip(operand.shape, operand.stride()) if stride != 1 and size > 1]
        assert all(stride % 8 == 0 for stride in strides), f"rows of {operand.shape} do not begin on 16 bytes"


def _require_untuned(tuned: bool) -> None:
    """Tuning measures each new shape, and groups of rows have another at every step."""
    assert not tuned
