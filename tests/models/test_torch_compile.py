"""Under ``torch.compile``, layers and the operations of dense parts have the outputs and gradients that they have without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moefw
from moefw.core.stages import Batch
from moefw.plugins.precision.quantized import MXFP8
from moefw.runtime.compute.casts import FP32Recipe
from moefw.testing.layer_case import LayerCase, build_layer
from moefw_kernels.rmsnorm import rms_norm
from moefw_kernels.rope import rotate

FP32, BF16 = torch.float32, torch.bfloat16
CONTEXT: Any = SimpleNamespace(device=torch.device("cpu"), site=SimpleNamespace(layer=0))
MX = MXFP8(backend="emulate").build(CONTEXT)


def drawn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return made.to(dtype).requires_grad_()


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(20.0).view(1, 5, 4)
    return rotate(x, angles.cos(), angles.sin(), neighbours=False)


OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-6), [drawn(6, 8), drawn(8)]),
    "rotate": (turned, [drawn(2, 5, 3, 8)]),
    "linear": (lambda x, w: moefw.linear(x, w, FP32Recipe()), [drawn(6, 8), drawn(4, 8)]),
    "linear, mxfp8": (lambda x, w: moefw.linear(x, w, MX), [drawn(64, 32, dtype=BF16), drawn(32, 32)]),
}


def solved(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = run(*inputs)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return out, torch.autograd.grad((out * weights).sum(), leaves)


def assert_compiles(run: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager")
    torch.testing.assert_close(solved(compiled, inputs, leaves), solved(run, inputs, leaves))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_a_dense_part(name: str) -> None:
    run, inputs = OPERATIONS[name]
    assert_compiles(run, inputs, inputs)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layer(precision: str) -> None:
    case = LayerCase(tokens=(64,), dim=16, expert_dim=16, shared=True, parts={"precision": {"use": precision}})
    layer, shared = build_layer(case)
    x_TD, ids_BS = case.draw(0)[0].requires_grad_(), torch.zeros(1, 64, dtype=torch.int64)
    batch = Batch(ids_BS=ids_BS, labels_BS=ids_BS)
    assert_compiles(lambda x: layer(x, batch)[0], [x_TD], [x_TD, *layer.parameters()])
    shared.close()
