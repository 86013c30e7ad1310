"""Groups of any size fit torch's grouped GEMM on a GPU: its checks, applied to the operands of every product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional as F

from moefw.core.site import Machine
from moefw.core.stages import ExpertBatch
from moefw.plugins.gemm.grouped import Grouped
from moefw.runtime.compute import grouped_mm
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.gemm_case import GemmCase, experts_of

SIZES = (3, 1, 0, 7)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The operands of the six products of forward and backward of bf16 experts, whose groups have odd sizes."""
    seen: list[tuple[Tensor, Tensor]] = []
    truth: Any = F.grouped_mm

    def noting(a: Tensor, b: Tensor, *, offs: Tensor) -> Any:
        seen.append((a, b))
        return truth(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", noting)
    monkeypatch.setattr(grouped_mm, "compiles_by_shape", lambda _: False)  # as on a GPU
    parts = {"gemm": {"use": "grouped"}, "precision": {"use": "bf16"}}
    experts, _ = experts_of(LayerCase(num_experts=4, dim=16, expert_dim=24, parts=parts))
    batch: ExpertBatch = GemmCase(counts=SIZES, seed=1).batch(16, torch.bfloat16)
    experts(batch).sum().backward()
    assert len(seen) == 6
    return seen


def fit_on_the_device(a: Tensor, b: Tensor) -> bool:
    """Return whether groups of any size pass the assertions on the device.

    Source: ``prepare_grouped_gemm_data`` in ``aten/src/ATen/native/cuda/GroupMMCommon.cuh`` of PyTorch. A group starts
    at any row, so its address is a multiple of 16 bytes only if rows are not what is contiguous.
    """
    a_by_rows, b_by_rows = a.stride(-1) == 1, b.stride(-1) == 1
    if a.dim() == b.dim() == 2:
        return not a_by_rows and b_by_rows
    return a.dim() == 2 and a_by_rows


def test_groups_of_any_size_pass_the_checks_on_the_device(products: list[tuple[Tensor, Tensor]]) -> None:
    for a, b in products:
        assert fit_on_the_device(a, b), (a.shape, a.stride(), b.shape, b.stride())


def test_operands_pass_the_checks_on_the_host(products: list[tuple[Tensor, Tensor]]) -> None:
    ends = torch.tensor(SIZES, dtype=torch.int32, device="meta").cumsum(0).int()
    for a, b in products:
        torch.ops.aten._grouped_mm(a.to("meta"), b.to("meta"), ends)


def test_a_gpu_asks_for_no_alignment_of_rows() -> None:
    site = LayerCase(parts={"gemm": {"use": "grouped"}}).assemble().site
    for device in ("cpu", "cuda"):
        needs = Grouped().needs(evolve(site, machine=Machine(device=device)))
        assert "row_alignment" not in {need.fact for need in needs}
