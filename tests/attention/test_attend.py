"""Attention is a dense softmax in fp64, in outputs, log-sum-exp and gradients; where SDPA does as much, it has its bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dense_attention import AttentionCase, dense_attention
from moefw.core.errors import ContractError
from moefw.runtime.attention import kernels
from moefw.runtime.attention.attend import attend
from moefw.runtime.attention.mask import Mask

Case = AttentionCase
CASES = {
    "grouped": Case(),
    "one key head": Case(groups=1),
    "a key head each": Case(groups=4),
    "six on three": Case(heads=6, groups=3),
    "sinks": Case(sinks=True),
    "window": Case(window=3),
    "window of the query alone": Case(window=1, sinks=True),
    "window longer than all": Case(window=9),
    "documents": Case(documents=True, keys=12, queries=12),
    "all": Case(documents=True, keys=12, queries=12, window=4, sinks=True, value_width=5, scale=0.3),
    "last queries": Case(queries=3),
    "last query of a window": Case(queries=1, window=4, sinks=True),
    "last queries of documents": Case(queries=3, keys=12, documents=True, sinks=True),
    "narrow values": Case(width=12, value_width=8),
    "wide values": Case(width=5, value_width=8, sinks=True),
    "scale": Case(scale=0.7, sinks=True),
    "one position": Case(queries=1, keys=1, sinks=True),
    "many positions": Case(batch=1, queries=70, keys=150, window=40, sinks=True),
    "nothing": Case(batch=0, sinks=True, documents=True),
    "no queries": Case(queries=0, sinks=True),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def results(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Return output, lse and gradients of :func:`attend`, and those of the definition."""
    tensors, mask = case.drawn(dtype)
    out, lse = attend(*tensors[:3], mask, sinks_H=tensors[3] if case.sinks else None, scale=case.scale)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    right, right_lse = dense_attention(*wide, mask=mask, scale=case.scale)
    found = [out.detach(), lse, *torch.autograd.grad(out, tensors, grad)]
    return found, [right.detach(), right_lse.detach(), *torch.autograd.grad(right, wide, grad.double())]


def agree(found: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    """Compare results to a part of the largest of each."""
    for name, one, other in zip(("out", "lse", "q", "k", "v", "sinks"), found, right, strict=False):
        assert one.shape == other.shape, name
        error, largest = ((x.abs().max() if x.numel() else x.new_zeros(())) for x in (one.double() - other, other))
        assert error <= tolerance * (1 + largest), f"{name}: {error} of {largest}"


@cases
def test_attention_is_a_softmax_over_visible_keys(case: Case) -> None:
    found, right = results(case)
    agree(found, right, 2e-6)
    assert [x.dtype for x in found] == [torch.float32] * len(found)


@cases
def test_bf16_is_as_near_as_its_rounding(case: Case) -> None:
    found, right = results(case, torch.bfloat16)
    agree(found, right, 2**-7)
    agree(found[1:2], right[1:2], 1e-4)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * (len(found) - 2)]


@settings(max_examples=25)
@given(
    st.builds(
        lambda times, more, **sizes: Case(
            heads=times * sizes["groups"], keys=sizes["queries"] + more, scale=None, **sizes
        ),
        times=st.integers(1, 3),
        more=st.integers(0, 4),
        batch=st.integers(0, 2),
        groups=st.integers(1, 3),
        queries=st.integers(1, 9),
        width=st.integers(1, 9),
        value_width=st.integers(1, 9),
        window=st.none() | st.integers(1, 6),
        documents=st.booleans(),
        sinks=st.booleans(),
    )
)
def test_any_sizes(case: Case) -> None:
    agree(*results(case), 4e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    tensors, mask = CASES["all"].drawn(torch.float64)
    out, lse = attend(*tensors[:3], mask, sinks_H=tensors[3])
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v, sinks: attend(q, k, v, mask, sinks_H=sinks)[0], tensors)


def of_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def of_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, Mask())[0]


def saved_bytes(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> int:
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        out = attention(*tensors)
    assert out.grad_fn is not None
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positions_first", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_without_more_than_sdpa_can_do_it_has_its_bits_and_bytes(
    dtype: torch.dtype, positions_first: bool, groups: int
) -> None:
    tensors, _ = Case(groups=groups, queries=33, keys=33, width=16, value_width=16).drawn(dtype)
    if positions_first:
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    ours, theirs = of_ours(*tensors), of_sdpa(*tensors)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    grad = torch.randn_like(ours)
    for one, other in zip(torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(theirs, tensors, grad)):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert saved_bytes(of_ours, tensors) <= saved_bytes(of_sdpa, tensors)


def test_narrow_values_save_no_padding() -> None:
    tensors, mask = Case(width=12, value_width=8).drawn()
    inputs = 4 * sum(x.numel() for x in tensors)
    out, lse = attend(*tensors, mask)
    assert saved_bytes(of_ours, tensors) == inputs + 4 * (out.numel() + lse.numel())


def test_a_mask_is_not_saved() -> None:
    tensors, _ = Case().drawn()
    masked = saved_bytes(lambda q, k, v: attend(q, k, v, Mask(window=3))[0], tensors)
    assert masked == saved_bytes(of_ours, tensors)


def test_the_log_sum_exp_has_no_gradient() -> None:
    (q, k, v, sinks), mask = Case(sinks=True).drawn()
    out, lse = attend(q, k, v, mask, sinks_H=sinks)
    assert out.requires_grad
    assert not lse.requires_grad


def test_a_sink_alone_can_learn() -> None:
    (q, k, v, sinks), mask = Case(sinks=True).drawn()
    wanted = torch.autograd.grad(attend(q, k, v, mask, sinks_H=sinks)[0].sum(), sinks)
    out, _ = attend(q.detach(), k.detach(), v.detach(), mask, sinks_H=sinks)
    assert torch.equal(torch.autograd.grad(out.sum(), sinks)[0], wanted[0])


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "positions last": lambda x: x.mT.contiguous().mT,
    "a slice of wider heads": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "every other position": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every other element": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("case", [Case(), CASES["all"]], ids=["plain", "all"])
def test_strides_do_not_matter(case: Case, strided: Callable[[Tensor], Tensor]) -> None:
    def everything(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        q, k, v = (change(x.detach()).requires_grad_() for x in tensors[:3])
        out, lse = attend(q, k, v, mask)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), change(torch.ones_like(out)))]

    tensors, mask = case.drawn()
    for one, other in zip(everything(strided), everything(lambda x: x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_keys_may_share_memory() -> None:
    (q, k, _), mask = Case(groups=1).drawn()
    shared = k.expand(-1, 2, -1, -1)
    out, _ = attend(q, shared, shared, mask)
    right, _ = attend(q, shared.contiguous(), shared.contiguous(), mask)
    assert torch.equal(out, right)
    assert torch.equal(*(torch.autograd.grad(x.sum(), k)[0] for x in (out, right)))


@cases
def test_fake_tensors_have_the_shapes_of_real_ones(case: Case) -> None:
    tensors, mask = case.drawn()
    out, lse = attend(*tensors[:3], mask, sinks_H=tensors[3] if case.sinks else None)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    with FakeTensorMode() as fake:
        copies = [fake.from_tensor(x) for x in tensors]
        documents = None if mask.documents_BS is None else fake.from_tensor(mask.documents_BS)
        unreal = Mask(window=mask.window, documents_BS=documents)
        found = attend(*copies[:3], unreal, sinks_H=copies[3] if case.sinks else None)
        fakes = torch.autograd.grad(found[0], copies, torch.ones_like(found[0]))
    for one, other in zip((*found, *fakes), (out, lse, *grads), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    assert found[0].stride() == out.stride()


def test_recomputation_and_a_second_backward_change_no_bit() -> None:
    (q, k, v, sinks), mask = CASES["all"].drawn()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask, sinks_H=sinks)[0]

    out, again = run(q, k, v, sinks), checkpoint(run, q, k, v, sinks, use_reentrant=False)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v, sinks), retain_graph=True) for _ in range(2))
    third = torch.autograd.grad(again.sum(), (q, k, v, sinks))
    with torch.no_grad():
        without = run(q, k, v, sinks)
    assert without.grad_fn is None
    assert torch.equal(out, again)
    assert torch.equal(out, without)
    for one, two, three in zip(first, second, third, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_it_compiles_without_a_break() -> None:
    (q, k, v, sinks), mask = CASES["all"].drawn()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask, sinks_H=sinks)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    out, right = compiled(q, k, v, sinks), run(q, k, v, sinks)
    assert torch.equal(out, right)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v, sinks)) for x in (out, right))):
        assert torch.equal(one, other)


def test_gradients_through_parts_of_the_keys_add_up() -> None:
    """The queries of a rank against its own keys and those of the rank before, as in a ring."""
    (q, k, v), mask = Case(queries=4, keys=8).drawn(torch.float64)
    out, lse = attend(q, k, v, mask)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    before, own = kernels.Scores(8**-0.5, causal=False), kernels.Scores(8**-0.5, causal=True)
    parts = [
        kernels.backward(grad, q, k_part, v_part, out, lse, scores)
        for k_part, v_part, scores in zip(k.split(4, 2), v.split(4, 2), (before, own))
    ]
    (q_1, k_1, v_1), (q_2, k_2, v_2) = parts
    for one, other in zip((q_1 + q_2, torch.cat([k_1, k_2], 2), torch.cat([v_1, v_2], 2)), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_what_does_not_fit_is_named_at_once() -> None:
    (q, k, v), _ = Case(heads=3).drawn()
    mask = Mask(window=0, documents_BS=torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(ContractError) as raised:
        attend(q, k[..., :4], v[:, :1], mask, sinks_H=torch.zeros(2))
    for part in (
        "attention to q (2, 3, 7, 8)",
        "k is (2, 2, 7, 4) and not (2, 2, 7, 8)",
        "v is (2, 1, 7, 8) and not (2, 2, 7, 8)",
        "sinks is (2,) and not (3,)",
        "documents is (1, 7) and not (2, 7)",
        "3 heads of queries do not share 2 heads of keys evenly",
        "a window of 0 positions does not hold the query's own",
    ):
        assert part in str(raised.value)
    with pytest.raises(ContractError, match="7 queries are not the last of 5 keys"):
        attend(q, k[:, :1, :5], v[:, :1, :5], Mask())


@pytest.mark.parametrize(
    "case", [Case(batch=1, keys=12, queries=12), Case(batch=1, keys=12, queries=12, sinks=True, window=3)]
)
def test_documents_whose_lengths_are_known_are_computed_one_by_one(case: Case) -> None:
    tensors, mask = case.drawn()
    lengths = (5, 1, 6)
    packed = Mask(
        window=mask.window, documents_BS=torch.arange(3).repeat_interleave(torch.tensor(lengths))[None], lengths=lengths
    )
    sinks = tensors[3] if case.sinks else None
    out, lse = attend(*tensors[:3], packed, sinks_H=sinks)
    alone = [
        attend(*parts, mask, sinks_H=sinks) for parts in zip(*(x.split(lengths, 2) for x in tensors[:3]), strict=True)
    ]
    assert torch.equal(out, torch.cat([one for one, _ in alone], 2))
    assert torch.equal(lse, torch.cat([one for _, one in alone], 2))
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    masked, _ = attend(*tensors[:3], replace(packed, lengths=None), sinks_H=sinks)
    for one, other in zip(*(torch.autograd.grad(made, tensors, grad) for made in (out, masked)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_documents_of_another_length_than_the_keys_are_refused() -> None:
    tensors, _ = Case(batch=1).drawn()
    with pytest.raises(ContractError, match=r"documents of \(3, 3\) positions are not 7 keys"):
        attend(*tensors, Mask(lengths=(3, 3)))
