"""SwiGLU kernels, forward and backward: the bits of PyTorch's operations, and an equally accurate sum.

Kernels run in separate processes, like those of ``test_fused_quantize.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from test_quantize_kernels import INF, NAN, awkward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moefw_kernels.swiglu import Clamp, blocks, reference, weighted_swiglu, weighted_swiglu_backward
from operators_seen import Operators
from pairwise import deep, each_value

CLAMPS = {"plain": None, "clamped": (1.3, 1.702)}
"""1.3 is not exact in bf16."""
SIZES = [(1, 1), (3, 17), (8, 128), (37, 130), (29, 257), (7, 389), (0, 5), (4, 0), (0, 0)]


def given(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, gate and up, and weights: zeros, infinities, NaN, huge and tiny numbers, and numbers not exact in bf16."""
    generator = torch.Generator().manual_seed(rows)
    weights_R = torch.rand(rows, generator=generator)
    weights_R[::5] = 0.0
    if rows > 28:
        weights_R[26], weights_R[27], weights_R[28] = INF, NAN, 1e-40
    grad_RF = awkward((rows, columns), torch.bfloat16).flip(0, 1)
    return grad_RF, awkward((rows, 2 * columns), torch.bfloat16), weights_R


def views(grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same tensors: contiguous, with a row stride, with a column stride, and expanded from one number."""
    yield grad_RF, h_RH, weights_R
    yield torch.cat([grad_RF] * 2, 1)[:, : grad_RF.shape[1]], torch.cat([h_RH] * 2, 1)[:, h_RH.shape[1] :], weights_R
    yield grad_RF.mT.contiguous().mT, h_RH.mT.contiguous().mT, torch.stack([weights_R] * 2, 1)[:, 0]
    yield torch.tensor(0.37).bfloat16().expand_as(grad_RF), h_RH, torch.tensor(0.3).expand_as(weights_R)


def same(mine: Tensor, right: Tensor) -> None:
    """Compare all bits except those of NaN."""
    assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
    assert torch.equal(mine.isnan(), right.isnan())
    word = {2: torch.int16, 4: torch.int32}[mine.element_size()]
    assert torch.equal(*(each.nan_to_num(nan=0.0, posinf=INF, neginf=-INF).view(word) for each in (mine, right)))


def as_good_a_sum(
    found_R: Tensor, grad_RF: Tensor, h_RH: Tensor, overflown_R: Tensor, clamp: Clamp | None = None
) -> None:
    """Compare the gradient of the weights with the exact sum of products, each of which is exact in fp32.

    A number is in ceil(F / C) - 1 sums of its tile column, then in fewer than min(F, C) sums of columns; each rounds
    with 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). A sum of finite terms
    that may overflow does so in some orders of its terms and in others not. Where a term is not finite, the result is
    ``overflown_R``.
    """
    from moefw_kernels.swiglu import triton

    tile, columns = triton._COLUMNS, grad_RF.shape[1]
    terms = grad_RF.double() * reference.swiglu(*h_RH.chunk(2, -1), clamp).double()
    rounding = max(-(-columns // tile) - 1 + min(columns, tile) - 1, 0) * 2.0**-24
    exact, magnitude = terms.sum(1), terms.abs().sum(1)
    allowed = magnitude * rounding / (1 - rounding) + columns * 2.0**-149
    bounded = magnitude < torch.finfo(torch.float32).max
    assert (found_R.dtype, found_R.shape) == (torch.float32, exact.shape)
    close = (found_R.double() - exact).abs() <= allowed
    assert close[bounded].all()
    finite = terms.isfinite().all(1)
    assert (close | ~found_R.isfinite())[~bounded & finite].all()
    same(found_R[~finite], overflown_R[~finite])


def hold_backward(grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> None:
    from moefw_kernels.swiglu import triton

    grad_h, grad_weights, a_RF = triton.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    wanted_h, wanted_weights, wanted_a = reference.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    same(grad_h, wanted_h)
    same(a_RF, wanted_a)
    as_good_a_sum(grad_weights, grad_RF, h_RH, wanted_weights, clamp)


def forward_kernel(size: tuple[int, int], clamp: Clamp | None) -> None:
    from moefw_kernels.swiglu import triton

    for _, h_RH, weights_R in views(*given(*size)):
        same(triton.weighted_swiglu(h_RH, weights_R, clamp), reference.weighted_swiglu(h_RH, weights_R, clamp))


def backward_kernel(size: tuple[int, int], clamp: Clamp | None) -> None:
    for each in views(*given(*size)):
        hold_backward(*each, clamp)


@pytest.mark.parametrize(("size", "clamp"), each_value(SIZES, CLAMPS.values()), ids=str)
def test_the_kernel_forward(interpreter: ProcessPoolExecutor, size: tuple[int, int], clamp: Clamp | None) -> None:
    interpreter.submit(forward_kernel, size, clamp).result()


@pytest.mark.parametrize(("size", "clamp"), each_value(SIZES, CLAMPS.values()), ids=str)
def test_the_kernel_backward(interpreter: ProcessPoolExecutor, size: tuple[int, int], clamp: Clamp | None) -> None:
    interpreter.submit(backward_kernel, size, clamp).result()


def all_bf16_numbers() -> Tensor:
    """All bf16 numbers, including subnormal ones, as (256, 256)."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)


def every_gate(forward: bool, clamp: Clamp | None) -> None:
    from moefw_kernels.swiglu import triton

    gate, one = all_bf16_numbers(), torch.ones(256, 256).bfloat16()
    h_RH, weights_R = torch.cat([gate, one], 1), torch.ones(256)
    if forward:
        same(triton.weighted_swiglu(h_RH, weights_R, clamp), reference.swiglu(gate, one, clamp))
    else:
        hold_backward(one, h_RH, weights_R, clamp)
        generator = torch.Generator().manual_seed(0)
        grad_RF, up = torch.randn(2, 256, 256, generator=generator).bfloat16()
        hold_backward(grad_RF, torch.cat([gate, up], 1), torch.rand(256, generator=generator), clamp)


@pytest.mark.parametrize(("forward", "clamp"), each_value([True, False], CLAMPS.values()), ids=str)
def test_every_bf16_number_is_a_gate(interpreter: ProcessPoolExecutor, forward: bool, clamp: Clamp | None) -> None:
    interpreter.submit(every_gate, forward, clamp).result()


def every_up_and_gradient(clamp: Clamp | None) -> None:
    from moefw_kernels.swiglu import triton

    numbers, one = all_bf16_numbers(), torch.full((256, 256), 1.375).bfloat16()
    weights_R = torch.rand(256, generator=torch.Generator().manual_seed(0))
    h_RH = torch.cat([one, numbers], 1)
    same(triton.weighted_swiglu(h_RH, weights_R, clamp), reference.weighted_swiglu(h_RH, weights_R, clamp))
    hold_backward(one, h_RH, weights_R, clamp)
    hold_backward(numbers, torch.cat([one, one], 1), weights_R, clamp)


@pytest.mark.parametrize("clamp", [CLAMPS["plain"], *deep(CLAMPS["clamped"])], ids=str)
def test_every_bf16_number_is_an_up_and_a_gradient(interpreter: ProcessPoolExecutor, clamp: Clamp | None) -> None:
    interpreter.submit(every_up_and_gradient, clamp).result()


def rows_alone() -> None:
    from moefw_kernels.swiglu import triton

    generator = torch.Generator().manual_seed(0)
    grad_RF, gate, up = torch.randn(3, 11, 389, generator=generator).bfloat16()
    h_RH, weights_R = torch.cat([gate, up], 1), torch.rand(11, generator=generator)
    together = triton.weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    for first in (1, 7):
        alone = triton.weighted_swiglu_backward(grad_RF[first:], h_RH[first:], weights_R[first:])
        for mine, right in zip(alone, together, strict=True):
            same(mine, right[first:])


def test_a_row_has_the_same_bits_wherever_it_lies(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(rows_alone).result()


class Calls(list[str]):
    """Records calls of forward and backward in place of the kernels."""

    def forward(self, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None) -> Tensor:
        self.append("kernel" if clamp is None else "clamped")
        return reference.weighted_swiglu(h_RH, weights_R, clamp)

    def backward(self, grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None) -> tuple[Tensor, ...]:
        self.append("kernel" if clamp is None else "clamped")
        return reference.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """All tensors report that they are on a GPU."""
    from moefw_kernels.swiglu import triton

    found = Calls()
    monkeypatch.setattr(triton, "weighted_swiglu", found.forward)
    monkeypatch.setattr(triton, "weighted_swiglu_backward", found.backward)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    return found


def plain() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(3, 4).bfloat16(), torch.ones(3, 8).bfloat16(), torch.ones(3)


def test_bf16_on_a_gpu_takes_the_kernel_each_way(calls: Calls) -> None:
    grad_RF, h_RH, weights_R = plain()
    weighted_swiglu(h_RH, weights_R)
    weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == ["kernel"] * 2
    with torch.no_grad():
        weighted_swiglu(h_RH.requires_grad_(), weights_R.requires_grad_())
        weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == ["kernel"] * 4
    weighted_swiglu(h_RH.detach(), weights_R.detach(), (7.0, 1.702))
    weighted_swiglu_backward(grad_RF, h_RH.detach(), weights_R.detach(), (7.0, 1.702))
    assert calls[4:] == ["clamped"] * 2


def test_a_gradient_flows_through_operations_of_pytorch(calls: Calls) -> None:
    grad_RF, h_RH, weights_R = plain()
    weighted_swiglu(h_RH.requires_grad_(), weights_R).sum().backward()
    assert h_RH.grad is not None
    weighted_swiglu(h_RH.detach(), weights_R.requires_grad_()).sum().backward()
    assert weights_R.grad is not None
    with pytest.raises(RuntimeError, match="out="):
        weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == []


class Subclass(Tensor):
    """A tensor subclass, as of a collective or a mesh."""


OTHERS: dict[str, Any] = {
    "fp32": lambda grad_RF, h_RH, weights_R: (grad_RF.float(), h_RH.float(), weights_R),
    "fp64": lambda grad_RF, h_RH, weights_R: (grad_RF.double(), h_RH.double(), weights_R.double()),
    "fp16": lambda grad_RF, h_RH, weights_R: (grad_RF.half(), h_RH.half(), weights_R),
    "weights in bf16": lambda grad_RF, h_RH, weights_R: (grad_RF, h_RH, weights_R.bfloat16()),
    "three axes": lambda grad_RF, h_RH, weights_R: (grad_RF[None, :2], h_RH[None, :2], weights_R[:1]),
    "one axis": lambda grad_RF, h_RH, weights_R: (grad_RF[0], h_RH[0], weights_R[0]),
    "a subclass": lambda grad_RF, h_RH, weights_R: (grad_RF, h_RH.as_subclass(Subclass), weights_R),
    "weights of a subclass": lambda grad_RF, h_RH, weights_R: (grad_RF, h_RH, weights_R.as_subclass(Subclass)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_all_else_takes_operations_of_pytorch(calls: Calls, other: str) -> None:
    grad_RF, h_RH, weights_R = OTHERS[other](*plain())
    assert weighted_swiglu(h_RH, weights_R).dtype is h_RH.dtype
    weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == []


def test_a_gradient_of_another_dtype_or_of_a_subclass_takes_operations_of_pytorch(calls: Calls) -> None:
    grad_RF, h_RH, weights_R = plain()
    weighted_swiglu_backward(grad_RF.float(), h_RH, weights_R)
    weighted_swiglu_backward(grad_RF.as_subclass(Subclass), h_RH, weights_R)
    assert calls == []


def test_what_does_not_fit_is_refused_by_operations_of_pytorch(calls: Calls) -> None:
    grad_RF, h_RH, weights_R = plain()
    with pytest.raises(RuntimeError):
        weighted_swiglu(h_RH[:, 1:], weights_R)
    with pytest.raises(RuntimeError):
        weighted_swiglu(h_RH, weights_R[1:])
    with pytest.raises(RuntimeError):
        weighted_swiglu_backward(grad_RF[:, 1:], h_RH, weights_R)
    assert calls == []


def test_a_compiler_sees_operations_of_pytorch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    grad_RF, h_RH, weights_R = plain()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    weighted_swiglu(h_RH, weights_R)
    weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == []


def test_a_tensor_that_is_not_there_takes_operations_of_pytorch(calls: Calls) -> None:
    with FakeTensorMode():
        grad_RF, h_RH, weights_R = plain()
        assert h_RH.is_cuda
        assert weighted_swiglu(h_RH, weights_R).shape == (3, 4)
        assert weighted_swiglu_backward(grad_RF, h_RH, weights_R)[0].shape == (3, 8)
    assert calls == []


def test_a_tensor_on_the_cpu_takes_operations_of_pytorch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    grad_RF, h_RH, weights_R = plain()
    monkeypatch.setattr(Tensor, "is_cuda", False)
    weighted_swiglu(h_RH, weights_R)
    weighted_swiglu_backward(grad_RF, h_RH, weights_R)
    assert calls == []


@pytest.mark.parametrize("clamp", CLAMPS)
def test_a_device_that_the_host_runs_ahead_of_takes_all_rows_at_once(clamp: str) -> None:
    def operators(rows: int) -> list[str]:
        """Those that a device without memory sees, in fp32."""
        grad_RF, h_RH, weights_R = (torch.empty(rows, *size, device="meta") for size in ((512,), (1024,), ()))
        with Operators() as seen:
            blocks.weighted_swiglu(h_RH, weights_R, CLAMPS[clamp])
            blocks.weighted_swiglu_backward(grad_RF, h_RH, weights_R, CLAMPS[clamp])
        return seen.names

    assert operators(2 * blocks.ELEMENTS) == operators(1)


@pytest.mark.parametrize(("clamp", "dtype"), each_value(CLAMPS, [torch.float32, torch.bfloat16]), ids=str)
def test_blocks_of_rows_have_the_bits_of_all_rows(
    clamp: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows at a time, and the rest. PyTorch's exp has other bits for some values of columns that are contiguous."""
    monkeypatch.setattr(blocks, "ELEMENTS", 3 * 257)
    for grad_RF, h_RH, weights_R in islice(views(*given(29, 257)), 2):
        together = grad_RF.to(dtype), h_RH.to(dtype), weights_R, CLAMPS[clamp]
        same(blocks.weighted_swiglu(*together[1:]), reference.weighted_swiglu(*together[1:]))
        found, wanted = (one.weighted_swiglu_backward(*together) for one in (blocks, reference))
        for mine, right in zip(found, wanted, strict=True):
            same(mine, right)
