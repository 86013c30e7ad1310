"""Checks that operands are multiplied as codes, without dequantization."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from moefw_kernels.quantize import Quantized


def dequantize_in_kernel_alone(monkeypatch: pytest.MonkeyPatch, products: ModuleType, kernel: str) -> None:
    """Let ``Quantized.dequantize`` fail except inside ``products.kernel``, whose reference runs on a CPU."""
    multiply, dequantize, inside = getattr(products, kernel), Quantized.dequantize, []

    def called(*args: Any, **kwargs: Any) -> Tensor:
        inside.append(True)
        try:
            return multiply(*args, **kwargs)
        finally:
            inside.pop()

    def watched(codes: Quantized) -> Tensor:
        assert inside, "an operand is dequantized"
        return dequantize(codes)

    monkeypatch.setattr(products, kernel, called)
    monkeypatch.setattr(Quantized, "dequantize", watched)
