"""How codes are multiplied as they are: what a format has to say about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from moefw.plugins.precision.quantized.gpus import Gpus
from moefw_kernels.quantize import Quantized


class Products(ABC):
    """The two products of a format. Codes lie along the axis that is summed over, sizes are multiples of ``multiple``.

    Sums are fp32 and are returned in ``out_dtype``, rounded before to bf16 where torch has nothing else.
    """

    gpus: ClassVar[Gpus]
    multiple: ClassVar[int]

    @abstractmethod
    def mm(self, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
        """Return the product of two matrices that are not empty."""

    @abstractmethod
    def grouped_mm(self, a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Return the products of groups, as ``torch.nn.functional.grouped_mm`` defines them; neither is empty.

        Zero for a group without rows, where rows are summed over; otherwise, rows past the last end are undefined.
        """
