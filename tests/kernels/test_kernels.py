"""References of the kernels: gradients checked numerically, sizes 0, 1 and primes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from moefw_kernels.permute import arrange, arrival, gather, gather_sum, group_chunks, sort_slots
from moefw_kernels.swiglu import swiglu, weighted_swiglu, weighted_swiglu_backward


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
    assert slots.rows.dropped == (slots.rows.bags is not None) == (len(wanted) < tokens * k)


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


def test_what_the_host_knows_is_not_read_back() -> None:
    ids_TK = torch.tensor([[0, 2], [1, 0], [-1, 2]])
    read, told = sort_slots(ids_TK, 3), sort_slots(ids_TK, 3, num_rows=5)
    assert torch.equal(read.slot_R, told.slot_R)
    assert torch.equal(read.rows.row_TK, told.rows.row_TK)
    with FakeTensorMode():
        assert len(sort_slots(torch.zeros(3, 2, dtype=torch.int64), 3, num_rows=6).slot_R) == 6
        groups = group_chunks([[3, 1], [0, 2], [2, 2]], 4, torch.device("cpu"), capacity=6, order=[0, 2, 1])
        assert groups.sizes == (8, 8)
        assert len(groups.restore(groups.regroup(torch.zeros(10, 4), torch.zeros(10))[0])) == 10


@given(
    st.integers(0, 6), st.integers(1, 3), st.integers(0, 1000), st.sampled_from([1, 4]), st.sampled_from([0, 5]),
    st.sampled_from([None, 0, 4, 12]), st.booleans(),
)  # fmt: skip
def test_arrived_rows_are_expanded_in_order_of_expert_and_source_within_the_budget(
    arrived: int, k: int, seed: int, alignment: int, capacity: int, budget: int | None, sources: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_NK = torch.randint(-1, 4, (arrived, k), generator=generator)
    source_N = torch.randint(0, 3, (arrived,), generator=generator) if sources else None
    arrival = arrange(ids_NK, 3, alignment=alignment, capacity=capacity, budget=budget, source_N=source_N)
    rows_ND = torch.arange(1.0, arrived + 1).unsqueeze(1)
    weights_NK = torch.arange(1.0, arrived * k + 1).view(arrived, k).requires_grad_()
    wanted: list[float] = []
    counts = []
    for expert in range(3):
        choices = [(n, c) for n in range(arrived) for c in range(k) if ids_NK[n, c] == expert]
        choices.sort(key=lambda choice: 0 if source_N is None else int(source_N[choice[0]]))
        size = -(-max(len(choices), capacity) // alignment) * alignment
        wanted += [weights_NK[n, c].item() for n, c in choices] + [0.0] * (size - len(choices))
        counts.append(len(choices))
    if budget is not None:
        counts = [sum(w > 0 for w in part) for part in _parts(wanted, counts, capacity, alignment, budget)]
        wanted = (wanted + [0.0] * budget)[:budget]
    rows_RD, weights_R = arrival.expand(rows_ND, weights_NK)
    assert weights_R.tolist() == wanted
    weights_R.backward(torch.where(weights_R > 0, weights_R, torch.nan))
    assert weights_NK.grad.flatten().tolist() == [w if w in wanted else 0.0 for w in weights_NK.flatten().tolist()]
    assert rows_RD[:, 0].tolist() == [-(-weight // k) for weight in wanted]
    assert arrival.counts_e.tolist() == counts
    assert arrival.offsets_e.tolist() == torch.tensor(arrival.sizes).cumsum(0).tolist()
    exceeded = int(((ids_NK >= 0) & (ids_NK < 3)).sum()) - sum(counts)
    assert arrival.left_out == (None if budget is None else exceeded)
    results_RD = torch.where(weights_R > 0, 1.0, torch.nan).unsqueeze(1).requires_grad_()
    back_ND = arrival.reduce(results_RD)
    assert back_ND.sum() == sum(counts)
    back_ND.sum().backward()
    assert results_RD.grad is not None
    assert torch.equal(results_RD.grad[:, 0], (weights_R > 0).float())


def _parts(rows: list[float], counts: list[int], capacity: int, alignment: int, budget: int) -> list[list[float]]:
    """Split rows into their groups, up to the budget."""
    parts, start = [], 0
    for count in counts:
        size = -(-max(count, capacity) // alignment) * alignment
        parts.append(rows[:budget][start : start + size])
        start += size
    return parts


@given(st.integers(0, 6), st.integers(1, 3), st.integers(0, 1000))
def test_where_the_host_would_wait_there_is_room_for_all_choices(tokens: int, k: int, seed: int) -> None:
    """What is computed of the rows past the last end does not matter, not even if it is no number."""
    ids_NK = torch.randint(-1, 3, (tokens, k), generator=torch.Generator().manual_seed(seed))
    x_ND, weights_NK = torch.arange(1.0, tokens + 1).unsqueeze(1), torch.ones(tokens, k, requires_grad=True)
    exact = arrange(ids_NK, 3)
    with patch.object(arrival, "runs_ahead", return_value=True):
        roomy = arrange(ids_NK, 3, counts_on_host=False)
    assert roomy.sizes is None
    assert torch.equal(roomy.counts_e, exact.counts_e)
    assert torch.equal(roomy.offsets_e, exact.offsets_e)
    wanted_RD, _ = exact.expand(x_ND, weights_NK)
    rows_RD, weights_R = roomy.expand(x_ND, weights_NK)
    used = torch.arange(tokens * k) < len(wanted_RD)
    assert torch.equal(rows_RD[used], wanted_RD)
    results_RD = torch.where(used.unsqueeze(1), rows_RD, torch.nan)
    assert torch.equal(roomy.reduce(results_RD), exact.reduce(wanted_RD))
    weights_R.backward(torch.where(used, 1.0, torch.nan))
    assert torch.equal(weights_NK.grad, (ids_NK >= 0).float())


@given(st.integers(0, 8), st.integers(0, 1000))
def test_where_the_host_would_wait_there_is_room_for_padding_that_is_a_small_share(aligned: int, seed: int) -> None:
    ids_NK = torch.randint(-1, 3, (48 * aligned, 1), generator=torch.Generator().manual_seed(seed))
    alignment = max(1, aligned)
    with patch.object(arrival, "runs_ahead", return_value=True):
        roomy = arrange(ids_NK, 3, alignment=alignment, counts_on_host=False)
    exact = arrange(ids_NK, 3, alignment=alignment)
    assert roomy.sizes is None
    assert torch.equal(roomy.counts_e, exact.counts_e)
    assert torch.equal(roomy.offsets_e, exact.offsets_e)
    assert len(exact.slot_R) <= len(roomy.slot_R) <= 48 * aligned + 3 * (alignment - 1)
    x_ND, weights_NK = torch.arange(1.0, len(ids_NK) + 1).unsqueeze(1), torch.ones(len(ids_NK), 1)
    (wanted_RD, wanted_R), (rows_RD, weights_R) = (each.expand(x_ND, weights_NK) for each in (exact, roomy))
    assert torch.equal(rows_RD[: len(wanted_RD)], wanted_RD)
    assert torch.equal(weights_R[: len(wanted_R)], wanted_R)
    assert not weights_R[len(wanted_R) :].any()
    assert torch.equal(roomy.reduce(rows_RD), exact.reduce(wanted_RD))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_gather_and_gather_sum_are_each_others_gradient(tokens: int) -> None:
    ids_TK = torch.arange(tokens * 2).view(tokens, 2) % 3 - (torch.arange(tokens) % 2).unsqueeze(1)
    rows = sort_slots(ids_TK, 3).rows
    x_TD = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    rows_RD = torch.randn(len(rows.token_R), 3, dtype=torch.float64, requires_grad=True)
    if tokens:
        assert torch.autograd.gradcheck(lambda x: gather(x, rows), (x_TD,))
        assert torch.autograd.gradcheck(lambda r: gather_sum(r, rows), (rows_RD,))
    assert gather(x_TD, rows).shape == (len(rows.token_R), 3)
    assert gather_sum(rows_RD, rows).shape == (tokens, 3)


@pytest.mark.parametrize("clamp", [None, (0.8, 1.702)], ids=["plain", "clamped"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_hand_written_swiglu_gradient_is_autograds(rows: int, clamp: tuple[float, float] | None) -> None:
    h_RH = torch.randn(rows, 10, dtype=torch.float64)
    h_RH[:, ::5] = 0.8  # at the limit the gradient passes
    h_RH.requires_grad_()
    weights_R = torch.rand(rows, dtype=torch.float64, requires_grad=True)
    grad_RF = torch.randn(rows, 5, dtype=torch.float64)
    a_RF = weighted_swiglu(h_RH, weights_R, clamp)
    wanted = torch.autograd.grad(a_RF, (h_RH, weights_R), grad_RF)
    grad_h, grad_weights, again = weighted_swiglu_backward(grad_RF, h_RH.detach(), weights_R.detach(), clamp)
    torch.testing.assert_close(grad_h, wanted[0])
    torch.testing.assert_close(grad_weights.double(), wanted[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, a_RF.detach())


@pytest.mark.parametrize("clamp", [None, (0.8, 1.702)], ids=["plain", "clamped"])
def test_the_routing_weight_multiplies_in_fp32(clamp: tuple[float, float] | None) -> None:
    """The activation times its weight is rounded once, and the gradient times its weight is not."""
    generator = torch.Generator().manual_seed(0)
    h_RH, grad_RF = (torch.randn(64, width, generator=generator).bfloat16() for width in (64, 32))
    weights_R = torch.rand(64, generator=generator)
    unweighted = swiglu(*h_RH.chunk(2, -1), clamp)
    exact = (unweighted.double() * weights_R.double().unsqueeze(1)).float().bfloat16()
    assert torch.equal(weighted_swiglu(h_RH, weights_R, clamp), exact)
    grad_h, _, again = weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    assert torch.equal(again, exact)
    wide_h, _, _ = weighted_swiglu_backward(grad_RF.double(), h_RH.double(), weights_R.double(), clamp)
    one_rounding = (grad_h.double() - wide_h).abs() <= 2.0**-8 * wide_h.abs()
    assert one_rounding.double().mean() > 0.8, "three in four, where the gradient times its weight is rounded, too"
