"""Interface of products of codes, one implementation per format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from moefw.plugins.precision.quantized.gpus import Gpus
from moefw_kernels.quantize import Quantized


class Products(ABC):
    """The two products of a format. Codes are contiguous along the summed axis, sizes are multiples of ``multiple``.

    Sums are fp32 and are returned in ``out_dtype``. Where torch returns only bf16, they are rounded to it first.
    """

    gpus: ClassVar[Gpus]
    multiple: ClassVar[int]

    @abstractmethod
    def mm(self, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
        """Product of two nonempty matrices."""

    @abstractmethod
    def grouped_mm(self, a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Products of groups, as ``torch.nn.functional.grouped_mm`` defines them, of nonempty operands.

        Where rows are summed over, a group without rows gives zero. Otherwise, rows past the last end are undefined.
        """
