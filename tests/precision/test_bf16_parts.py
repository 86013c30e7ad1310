"""Products of bf16 parts of fp32 matrices are as exact as those in fp32. A CPU multiplies the parts in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moefw.runtime.compute import bf16_parts
from moefw.runtime.compute.bf16_parts import BF16Sum, takes_parts
from moefw.runtime.compute.product import wide_linear
from moefw.runtime.compute.weights import shared_by_micro_batches

TOKENS, DIM, EXPERTS = 300, 512, 64


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Size, torch.Size]]]:
    """Let tensors take the parts as on a GPU, and return the shapes of all products."""
    shapes = []

    def fp32_mm(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        shapes.append((a.shape, b.shape))
        return a.float() @ b.float()

    with monkeypatch.context() as patch:
        patch.setattr(bf16_parts, "fp32_mm", fp32_mm)
        patch.setattr(bf16_parts, "takes_kernels", lambda _: True)
        yield shapes


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(TOKENS, DIM, generator=generator).bfloat16()
    weight_ED = torch.randn(EXPERTS, DIM, generator=generator) * torch.logspace(-3, 3, DIM)
    return x_TD, weight_ED, torch.randn(TOKENS, EXPERTS, generator=generator)


def test_the_parts_add_up_to_every_bit() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-25, 25, 1000)
    parts = BF16Sum.of(x).parts
    assert len(parts) == 3
    assert torch.equal(sum(part.double() for part in parts), x.double())


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def test_no_product_is_further_from_fp64_than_one_of_fp32(products: list[tuple[torch.Size, torch.Size]]) -> None:
    x, weight, grad = drawn()
    of_parts = (
        BF16Sum.of(x) @ BF16Sum.of(weight).mT,
        BF16Sum.of(grad) @ BF16Sum.of(weight),
        BF16Sum.of(grad).mT @ BF16Sum.of(x),
    )
    of_fp32 = (x.float() @ weight.mT, grad @ weight, grad.mT @ x.float())
    of_fp64 = (x.double() @ weight.double().mT, grad.double() @ weight.double(), grad.double().mT @ x.double())
    for mine, other, exact in zip(of_parts, of_fp32, of_fp64, strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, exact) <= error(other, exact)
    assert len(products) == 3


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_wide_product_is_made_of_parts(products: list[tuple[torch.Size, torch.Size]], in_a_step: bool) -> None:
    x, weight, grad = drawn()
    rows, parameter = x.clone().requires_grad_(), nn.Parameter(weight)
    saved: list[Tensor] = []
    with (
        shared_by_micro_batches([parameter] if in_a_step else []),
        torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one),
    ):
        for _ in range(2):
            out = wide_linear(rows, parameter, torch.float32)
            out.backward(grad)
    assert len(products) == 6
    assert {one.data_ptr() for one in saved} <= {rows.data_ptr(), parameter.data_ptr()}
    torch.testing.assert_close(out, x.float() @ weight.mT, rtol=1e-5, atol=1e-2)
    assert rows.grad is not None
    assert parameter.grad is not None
    torch.testing.assert_close(rows.grad, 2 * (grad @ weight).bfloat16())
    torch.testing.assert_close(parameter.grad, 2 * (grad.mT @ x.float()), rtol=1e-5, atol=1e-4)


def test_no_rows_have_products(products: list[tuple[torch.Size, torch.Size]]) -> None:
    rows, parameter = torch.zeros(0, 8).bfloat16().requires_grad_(), nn.Parameter(torch.ones(4, 8))
    out = wide_linear(rows, parameter, torch.float32)
    out.backward(torch.zeros(0, 4))
    assert out.shape == (0, 4)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.zeros(4, 8))


def test_only_bf16_rows_and_an_fp32_weight_on_a_gpu_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = drawn()
    assert not takes_parts(x, weight, torch.float32)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert takes_parts(x, weight, torch.float32)
    assert not takes_parts(x, weight, torch.float64)
    assert not takes_parts(x.half(), weight, torch.float32)
    assert not takes_parts(x, weight.bfloat16(), torch.float32)
    assert not takes_parts(x.float(), weight, torch.float32)
