"""Grouped products behave as torch documents, also where one of its kernels does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.runtime.compute import grouped_mm as products

ENDS = torch.tensor([3, 3, 8, 8], dtype=torch.int32)
"""The second and the last of four groups have no rows."""


def test_a_sum_over_no_rows_is_zero_where_the_kernel_leaves_it_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritten(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        found = truth(a, b, offs=offs)
        found[[1, 3]] = float("nan")
        return found

    truth: Any = F.grouped_mm
    grad_RO, x_RI = torch.randn(8, 4), torch.randn(8, 8)
    right = products.grouped_mm(grad_RO.mT, x_RI, ENDS)
    monkeypatch.setattr(F, "grouped_mm", unwritten)
    monkeypatch.setattr(products, "_leaves_empty_sums_unwritten", lambda device: True)
    found = products.grouped_mm(grad_RO.mT, x_RI, ENDS)
    assert torch.equal(found, right)
    assert not found[1].any()


@pytest.mark.parametrize(
    ("device", "capability", "leaves"), [("cpu", None, False), ("cuda", 9, False), ("cuda", 10, True)]
)
def test_kernels_of_blackwell_do(device: str, capability: int, leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    products._leaves_empty_sums_unwritten.cache_clear()
    assert products._leaves_empty_sums_unwritten(torch.device(device)) is leaves
    products._leaves_empty_sums_unwritten.cache_clear()


def test_a_rank_without_rows_asks_for_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "grouped_mm", None)
    ends, weight_eOI = torch.zeros(4, dtype=torch.int32), torch.randn(4, 4, 8)
    assert products.grouped_mm(torch.empty(0, 8), weight_eOI.mT, ends).shape == (0, 4)
    grad_weight = products.grouped_mm(torch.empty(0, 4).mT, torch.empty(0, 8), ends)
    assert torch.equal(grad_weight, torch.zeros(4, 4, 8))
