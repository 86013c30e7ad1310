"""References of the kernels: gradients checked numerically, sizes 0, 1 and primes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefw_kernels.permute import RowMap, gather, gather_sum, group_chunks, sort_slots
from moefw_kernels.swiglu import weighted_swiglu, weighted_swiglu_backward


@given(st.integers(0, 7), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1000))
def test_rows_are_sorted_by_expert_then_token_and_dropped_choices_have_none(
    tokens: int, k: int, experts: int, seed: int
) -> None:
    ids_TK = torch.randint(-1, experts + 1, (tokens, k), generator=torch.Generator().manual_seed(seed))
    slots = sort_slots(ids_TK, experts)
    wanted = [
        (expert, token, choice)
        for expert in range(experts)
        for token in range(tokens)
        for choice in range(k)
        if ids_TK[token, choice] == expert
    ]
    assert slots.slot_R.tolist() == [token * k + choice for _, token, choice in wanted]
    assert slots.counts.tolist() == [sum(e == expert for e, _, _ in wanted) for expert in range(experts)]
    for row, (_, token, choice) in enumerate(wanted):
        assert slots.rows.row_TK[token, choice] == row
    assert slots.rows.dropped == (len(wanted) < tokens * k)


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from([1, 4, 7])
)
def test_chunks_are_regrouped_by_expert_padded_and_restored(chunks: list[list[int]], alignment: int) -> None:
    names = [
        (rank, expert, row) for rank, chunk in enumerate(chunks) for expert, n in enumerate(chunk) for row in range(n)
    ]
    arrived = torch.tensor([[1 + 100 * rank + 10 * expert + row] for rank, expert, row in names], dtype=torch.float64)
    arrived = arrived.view(len(names), 1)
    groups = group_chunks(chunks, alignment, torch.device("cpu"))
    rows, weights = groups.regroup(arrived, arrived[:, 0])
    wanted: list[float] = []
    for expert in range(3):
        mine = [float(1 + 100 * rank + 10 * e + row) for rank, e, row in sorted(names) if e == expert]
        wanted += mine + [0.0] * (-len(mine) % alignment)
    assert rows[:, 0].tolist() == wanted == weights.tolist()
    assert torch.equal(groups.restore(rows), arrived)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_gather_and_gather_sum_are_each_others_gradient(tokens: int) -> None:
    ids_TK = torch.arange(tokens * 2).view(tokens, 2) % 3 - (torch.arange(tokens) % 2).unsqueeze(1)
    slots = sort_slots(ids_TK, 3)
    rows = RowMap(slots.rows.token_R, slots.rows.row_TK, padding=None, dropped=True)
    x_TD = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    rows_RD = torch.randn(len(rows.token_R), 3, dtype=torch.float64, requires_grad=True)
    if tokens:
        assert torch.autograd.gradcheck(lambda x: gather(x, rows), (x_TD,))
        assert torch.autograd.gradcheck(lambda r: gather_sum(r, rows), (rows_RD,))
    assert gather(x_TD, rows).shape == (len(rows.token_R), 3)
    assert gather_sum(rows_RD, rows).shape == (tokens, 3)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_hand_written_swiglu_gradient_is_autograds(rows: int) -> None:
    h_RH = torch.randn(rows, 10, dtype=torch.float64, requires_grad=True)
    weights_R = torch.rand(rows, dtype=torch.float64, requires_grad=True)
    grad_RF = torch.randn(rows, 5, dtype=torch.float64)
    a_RF = weighted_swiglu(h_RH, weights_R)
    wanted = torch.autograd.grad(a_RF, (h_RH, weights_R), grad_RF)
    grad_h, grad_weights, again = weighted_swiglu_backward(grad_RF, h_RH.detach(), weights_R.detach())
    torch.testing.assert_close(grad_h, wanted[0])
    torch.testing.assert_close(grad_weights.double(), wanted[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, a_RF.detach())
