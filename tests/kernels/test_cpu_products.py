"""Products of groups of bf16 rows on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from moefw.runtime.compute.grouped_mm import grouped_mm
from moefw_kernels.add_wgrad import add_wgrad
from moefw_kernels.cpu_products import ROWS

DIM_IN, DIM_OUT = 24, 40
GROUPS = {
    "ragged": [5, 0, 70, 33, 1, 64],
    "whole blocks": [32, 64, 32],
    "a small last group": [200, 3],
    "small last groups": [200, 3, 2, 1],
    "a last group without rows": [90, 31, 0],
    "fewer rows than a block": [3, 0, 9],
    "no rows": [0, 0],
}
BEHIND = [0, 7, 50]
"""Rows that follow the last group."""


def drawn(groups: Sequence[int], behind: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, matrices, gradients of rows, and ends."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(groups) + behind
    sizes = (rows, DIM_IN), (len(groups), DIM_IN, DIM_OUT), (rows, DIM_OUT)
    x, w, grad = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return x, w, grad, torch.tensor(groups).cumsum(0).int()


def spans(ends: Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise([0, *ends.tolist()])]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_each_group_is_multiplied_by_its_matrix(groups: list[int], behind: int) -> None:
    x, w, _, ends = drawn(groups, behind)
    made = grouped_mm(x, w, ends)
    assert made.shape == (len(x), DIM_OUT)
    for rows, matrix in zip(spans(ends), w, strict=True):
        assert_close(made[rows].float(), x[rows].float() @ matrix.float(), rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_each_group_has_its_sum_over_rows(groups: list[int], behind: int) -> None:
    x, _, grad, ends = drawn(groups, behind)
    wanted = torch.stack([grad[rows].float().mT @ x[rows].float() for rows in spans(ends)])
    assert_close(grouped_mm(grad.mT, x, ends).float(), wanted, rtol=2**-7, atol=1e-2)
    main = torch.ones_like(wanted)
    add_wgrad(main, grad, x, ends, fresh=False)
    assert_close(main - 1.0, wanted, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_rows_of_other_groups_and_behind_the_last_one_do_not_matter(bad: int) -> None:
    """Not even if they are no numbers."""
    groups, behind = [37, 50], 9
    x, w, grad, ends = drawn(groups, behind)
    bounds = [0, 37, 87, 96]
    x_bad, grad_bad = x.clone(), grad.clone()
    for one in (x_bad, grad_bad):
        one[bounds[bad] : bounds[bad + 1]] = torch.nan
    for group, rows in enumerate(spans(ends)):
        if group != bad:
            assert torch.equal(grouped_mm(x_bad, w, ends)[rows], grouped_mm(x, w, ends)[rows])
            assert torch.equal(grouped_mm(grad_bad.mT, x_bad, ends)[group], grouped_mm(grad.mT, x, ends)[group])


def test_products_take_few_shapes_whatever_the_numbers_of_rows() -> None:
    """Each shape that is met for the first time costs more than the product of a small expert."""
    most = 96
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        for seed in range(40):
            groups = torch.randint(0, most, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
            x, w, grad, ends = drawn([*groups, most], 0, seed=seed)
            grouped_mm(x, w, ends)
            grouped_mm(grad.mT, x, ends)
    products = [event for event in seen.events() if event.name in ("aten::mm", "aten::addmm_")]
    shapes = {tuple(map(tuple, product.input_shapes[:3])) for product in products}
    assert len(products) >= 2 * 40 * 6
    assert len(shapes) == 2 * most // ROWS
