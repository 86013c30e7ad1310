"""The kernels of balance losses have the sums, losses and gradients of the reference, the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefw_kernels.routing import MOST_CHOICES, MOST_EXPERTS, Gating, Segments, switch_loss, token_sums, z_loss
from moefw_kernels.routing.balance import reference
from pairwise import deep, each_value

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    #                             tokens of each segment, experts, k
    "few": ((13,) * 3, 7, 3),
    "one segment": ((70,), 12, 2),
    "all of a segment of one": ((1,) * 5, 8, 8),
    "one of one": ((3,), 1, 1),
    "empty segments": ((0,) * 2, 4, 2),
    "no segments": ((), 4, 2),
    "most": ((2,), MOST_EXPERTS, MOST_CHOICES),
    "blocks": ((64,) * 2, 5, 2),
    "documents": ((40, 1, 0, 0, 33, 2), 7, 3),
    "one among empty ones": ((0,) * 40 + (5,) + (0,) * 40, 6, 5),
    "ends of blocks": ((0, 32, 64, 0, 31, 1), 3, 1),
    "short ones": ((1, 2, 0, 3) * 2, 40, 3),
}
Found = tuple[dict[str, Tensor], Tensor]


def segments_of(lengths: tuple[int, ...], *, named: bool) -> Segments:
    """Return segments of these lengths, by the segment of each token or as segments of equally many."""
    assert named or len({*lengths}) <= 1
    segment_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return Segments(len(lengths), segment_T if named else None)


def logits_of(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Logits some of which saturate each score, and some of which are equal."""
    logits_TE = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3.0
    logits_TE[1::7, ::3] -= 60.0
    logits_TE[2::7] = logits_TE[2::7].round()
    return logits_TE


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Let tensors take the kernels."""
    Tensor.is_cuda = True  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.is_cuda


def from_sums(
    of: Any, switch: Any, logits_TE: Tensor, gating: Gating, segments: Segments, coeffs: tuple[float, ...], **more: Any
) -> Found:
    """Return the sums and losses of a function, and the gradient of all that have one."""
    given = logits_TE.detach().clone().requires_grad_()
    over = [segments] if len(coeffs) == 2 else [segments, None]
    sums, z = of(given, gating, over, **more, z_coeff=coeffs[0])
    found = {f"{name} {number}": x for number, each in enumerate(sums) for name, x in each._asdict().items()}
    for each in sums:
        each.seen_GX.mul_(2)  # as ranks add theirs in place
    found["switch"] = switch(*sums[0], gating.k, coeffs[1])
    loss = found["switch"]
    if z is not None:
        found["z"] = z.clone()
        z.detach().mul_(2)  # as an engine may add up losses in place
        loss = loss + found["z"]
    if len(sums) > 1:
        loss = loss + coeffs[2] * sums[1].mass_GE.square().sum()
    loss.backward()
    assert given.grad is not None
    return found, given.grad


def of_kernels(*args: Any, **more: Any) -> Found:
    with on_a_gpu():
        return from_sums(token_sums, switch_loss, *args, **more)


def of_reference(*args: Any, **more: Any) -> Found:
    def sums(logits_TE: Tensor, gating: Gating, over: Any, *, z_coeff: float | None, **more: Any) -> Any:
        given = (more.get("scores_TE"), more.get("ids_TK"), more.get("mask_T"), z_coeff)
        return reference.token_sums(logits_TE, gating, over, *given)

    return from_sums(sums, reference.switch_loss, *args, **more)


def ranked(logits_TE: Tensor, gating: Gating, mask_T: Tensor | None) -> Tensor:
    """The top-k as kernels choose: of equals those with the lowest ids."""
    by_TE = logits_TE if gating.score == "softmax" else reference.SCORES[gating.score](logits_TE)
    ids_TK = by_TE.sort(dim=-1, descending=True, stable=True).indices[:, : gating.k]
    return ids_TK if mask_T is None else ids_TK.masked_fill(~mask_T.unsqueeze(1), -1)


def close(mine: Found, right: Found, scale: float = 1.0) -> None:
    for name, found in mine[0].items():
        if name.startswith("seen"):
            assert torch.equal(found, right[0][name])
        else:
            torch.testing.assert_close(found, right[0][name].float(), rtol=1e-5, atol=1e-6 * scale)
    torch.testing.assert_close(mine[1], right[1].float(), rtol=1e-5, atol=1e-6 * scale)


def same_bits(one: Found, other: Found) -> bool:
    return all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and torch.equal(one[1], other[1])


def kernels_as_the_reference(score: str, shape: str) -> None:
    """In fp64 with the choices of the kernels; twice, with the same bits, by name too."""
    lengths, experts, k = SHAPES[shape]
    tokens, equal = sum(lengths), len({*lengths}) <= 1
    logits_TE, gating = logits_of((tokens, experts)), Gating(k=k, score=score)
    mask_T = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    mask_T[: max(lengths, default=0)] = False
    every = (mask_T, (0.3, 0.7, 0.1)), (None, (None, 0.7)), (mask_T, (0.3, 0.7)), (mask_T, (None, 2.0))
    # With the most experts each case takes seconds: one there, in which tokens count and all losses are.
    cases = ((None, (0.3, 0.7)),) if experts == MOST_EXPERTS else every[: None if shape in ("few", "documents") else 2]
    segments, again_by = segments_of(lengths, named=not equal), segments_of(lengths, named=True)
    for mask, coeffs in cases:
        ids_TK = ranked(logits_TE, gating, mask)
        right = of_reference(logits_TE.double(), gating, segments, coeffs, ids_TK=ids_TK, mask_T=mask)
        for chosen_TK in (ids_TK, None):
            mine, again = (
                of_kernels(logits_TE, gating, by, coeffs, ids_TK=chosen_TK, mask_T=mask) for by in (segments, again_by)
            )
            close(mine, right, scale=1.0 if equal else 10.0)
            assert same_bits(mine, again)
            assert mine[0]["mass_GE 0"].dtype == mine[0]["seen_GX 0"].dtype == mine[1].dtype == torch.float32


@pytest.mark.parametrize(("score", "shape"), each_value(SCORES, SHAPES))
def test_the_kernels(interpreter: ProcessPoolExecutor, score: str, shape: str) -> None:
    interpreter.submit(kernels_as_the_reference, score, shape).result()


def drawn_case(
    seed: int, lengths: tuple[int, ...], experts: int, k: int, score: str, named: bool, masked: bool, z: bool
) -> None:
    if not named:
        lengths = lengths[:1] * len(lengths)
    logits_TE, gating = logits_of((sum(lengths), experts), seed), Gating(k=min(k, experts), score=score)
    mask_T = torch.rand(len(logits_TE), generator=torch.Generator().manual_seed(seed)) < 0.5 if masked else None
    coeffs, ids_TK, segments = (
        (0.5 if z else None, 1.5),
        ranked(logits_TE, gating, mask_T),
        segments_of(lengths, named=named),
    )
    mine = of_kernels(logits_TE, gating, segments, coeffs, mask_T=mask_T)
    right = of_reference(logits_TE.double(), gating, segments, coeffs, ids_TK=ids_TK, mask_T=mask_T)
    close(mine, right, scale=10.0)


DRAWN = st.tuples(
    *(st.integers(0, 1000), st.lists(st.integers(0, 70), min_size=1, max_size=6).map(tuple)),
    *(st.integers(1, 40), st.integers(1, 9), st.sampled_from(SCORES), st.booleans(), st.booleans(), st.booleans()),
)


@pytest.mark.parametrize("number", [12, *deep(100)])
def test_drawn_cases(interpreter: ProcessPoolExecutor, number: int) -> None:
    @settings(max_examples=number, deadline=None)
    @given(DRAWN)
    def check_one(case: tuple[Any, ...]) -> None:
        interpreter.submit(drawn_case, *case).result()

    check_one()


def more_parts_than_are_added_up_at_once(parts: int) -> None:
    from moefw_kernels.routing.balance import triton

    lengths = 3, parts * triton.TOKENS + 40, 7
    logits_TE, gating, coeffs = logits_of((sum(lengths), 2)), Gating(k=1), (0.3, 0.7)
    for segments in (segments_of(lengths, named=True), Segments(1)):
        with mock.patch.object(triton, "PARTS", parts):
            mine = of_kernels(logits_TE, gating, segments, coeffs)
        ids_TK = ranked(logits_TE, gating, None)
        close(mine, of_reference(logits_TE.double(), gating, segments, coeffs, ids_TK=ids_TK), scale=100.0)


@pytest.mark.parametrize("parts", [4, *deep(128)])
def test_a_row_of_more_parts_than_are_added_up_at_once(interpreter: ProcessPoolExecutor, parts: int) -> None:
    """Parts hold 32 tokens each, so that few at once need fewer tokens."""
    interpreter.submit(more_parts_than_are_added_up_at_once, parts).result()


def as_before_at_the_limits_of_fp32() -> None:
    """Infinite and undefined logits, scores that add up to 0 or are subnormal, and tokens that do not count."""
    far, low, inf, nan = -200.0, -88.0, float("inf"), float("nan")
    segments = [
        [1.0, inf, 0.0],
        [far, far, far],
        [low, low - 0.5, far],
        [0.0, -inf, 2.0],
        [-inf, -inf, -inf],
        [nan, 1.0, 2.0],
    ]
    for score in SCORES:
        for segment in segments:
            logits_TE = torch.tensor([[0.5, 1.0, 2.0], segment, [0.1, 0.3, 0.2]])
            for mask_T in (None, torch.tensor([True, False, True])):
                gating = Gating(k=1, score=score)
                given = (logits_TE, gating, Segments(1), (0.3, 0.7))
                ids_TK = ranked(logits_TE, gating, mask_T)
                mine, right = (of(*given, ids_TK=ids_TK, mask_T=mask_T) for of in (of_kernels, of_reference))
                for name, found in mine[0].items():
                    torch.testing.assert_close(found, right[0][name], equal_nan=True)
                torch.testing.assert_close(mine[1], right[1], equal_nan=True)


def test_infinite_and_undefined_logits_have_the_losses_of_the_reference(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(as_before_at_the_limits_of_fp32).result()


def as_on_a_gpu() -> None:
    """What a GPU takes kernels for, and what is saved for backward."""
    logits_TE, gating = logits_of((12, 8)), Gating(k=2)
    valid_T = (torch.arange(12) % 3 > 0).float()
    for valid in (valid_T, valid_T.bool()):
        mine, right = (logits_TE.clone().requires_grad_() for _ in range(2))
        with on_a_gpu():
            z_loss(mine, valid).backward()
        reference.token_sums(right, gating, (), None, None, valid, 1.0)[1].backward()
        torch.testing.assert_close(mine.grad, right.grad)
    held: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x)
    with on_a_gpu(), hooks:
        (sums,), _ = token_sums(mine, gating, [Segments(3)], mask_T=valid_T, z_coeff=0.1)
    assert [x.data_ptr() for x in held] == [mine.data_ptr(), valid_T.data_ptr()]
    with on_a_gpu():
        mine.grad = None
        sums.mass_GE[1].sum().backward()
        assert mine.grad[4:8].any()
        assert not mine.grad[:4].any()
        assert not mine.grad[8:].any()
        assert token_sums(mine, gating, ()) == ((), None)
    segments = segments_of((5, 0, 7), named=True)
    with on_a_gpu(), hooks:
        held.clear()
        mine.grad = None
        (sums,), _ = token_sums(mine, gating, [segments])
    assert [x.data_ptr() for x in held] == [mine.data_ptr(), segments.segment_T.data_ptr()]
    with on_a_gpu():
        sums.mass_GE[2].sum().backward()
        assert not mine.grad[:5].any()
        assert mine.grad[5:].any()
    with on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.delattr("moefw_kernels.routing.balance.triton.token_sums")
        for dtype, experts, k in ((torch.float64, 8, 2), (torch.float32, MOST_EXPERTS + 1, 2), (torch.float32, 64, 33)):
            (sums,), _ = token_sums(torch.randn(2, experts, dtype=dtype), Gating(k=k), [Segments(1)])
            assert sums.seen_GX.shape == (1, experts + 1)


def test_on_a_gpu_the_kernels_add_up_rows(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(as_on_a_gpu).result()


@pytest.mark.parametrize("score", SCORES)
def test_the_reference_in_fp64_has_the_slopes_of_its_losses(score: str) -> None:
    logits_TE = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    segments, mask_T = segments_of((2, 0, 4), named=True), torch.tensor([True, True, False, True, True, True])

    def losses(given: Tensor) -> tuple[Tensor, Tensor]:
        (sums,), z = token_sums(given, Gating(k=2, score=score), [segments], mask_T=mask_T, z_coeff=0.1)
        assert z is not None
        return switch_loss(*sums, 2, 0.7), z

    assert torch.autograd.gradcheck(losses, (logits_TE,))


def test_segments_of_equal_length_are_those_whose_tokens_are_named() -> None:
    logits_TE, over = logits_of((12, 6)), [segments_of((4, 4, 4), named=named) for named in (False, True)]
    for gating in (Gating(k=2, score=score) for score in SCORES):
        ((mass_GE, seen_GX), named), _ = token_sums(logits_TE, gating, over)
        assert torch.equal(mass_GE, named.mass_GE)
        assert torch.equal(seen_GX, named.seen_GX)
        assert seen_GX[:, -1].tolist() == [4.0, 4.0, 4.0]
        torch.testing.assert_close(mass_GE.sum(), torch.tensor(12.0))
