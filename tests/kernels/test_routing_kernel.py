"""The router's kernels choose what the reference chooses, and have its weights, counts, scores and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from moefw_kernels.routing import MOST_CHOICES, MOST_EXPERTS, Chosen, Gating, reference, route
from pairwise import each_value

SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax of all": {"pre_softmax": True},
    "sigmoid": {"score": "sigmoid", "renormalise": True, "scale": 2.5},
    "sigmoid without renormalising": {"score": "sigmoid"},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "renormalise": True},
    "sqrtsoftplus without renormalising": {"score": "sqrtsoftplus", "scale": 0.5},
}
SHAPES = {
    "few": (37, 7, 3, None),
    "all": (5, 8, 8, None),
    "one of one": (3, 1, 1, None),
    "no tokens": (0, 4, 2, None),
    "groups": (33, 24, 6, (3, 2, 2)),
    "groups of one": (9, 6, 2, (6, 2, 1)),
    "most": (3, MOST_EXPERTS, MOST_CHOICES, None),
}

DEEP = [pytest.param(score, "most", marks=pytest.mark.deep) for score in SCORES if score != "sigmoid"]


def logits_of(shape: tuple[int, int]) -> Tensor:
    """Logits some of which saturate each score, without equals."""
    generator = torch.Generator().manual_seed(sum(shape))
    logits_TE = torch.randn(shape, generator=generator) * 3.0
    logits_TE[::7] *= 0.1
    logits_TE[1::7, ::3] -= 60.0
    return logits_TE


def variants(tokens: int, experts: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield biases and masks."""
    generator = torch.Generator().manual_seed(1)
    bias_E, mask_T = torch.randn(experts, generator=generator), torch.rand(tokens, generator=generator) < 0.7
    yield bias_E, mask_T
    yield None, None
    yield bias_E, None
    yield None, mask_T


def kernels(
    logits_TE: Tensor, gating: Gating, bias_E: Tensor | None, mask_T: Tensor | None, grad_TK: Tensor
) -> tuple[Chosen, Tensor]:
    from moefw_kernels.routing import triton

    (*routed, entropy), chosen_TK = triton.route(logits_TE, gating, bias_E, mask_T)
    saved_TE = logits_TE if gating.pre_softmax else None
    grad_TE = triton.route_backward(routed[0], chosen_TK, saved_TE, grad_TK, gating, logits_TE.shape[1])
    return Chosen(*routed, None, entropy), grad_TE


def references(
    logits_TE: Tensor, gating: Gating, bias_E: Tensor | None, mask_T: Tensor | None, grad_TK: Tensor
) -> tuple[Chosen, Tensor]:
    given = logits_TE.detach().requires_grad_()
    routed = reference.route(given, gating, bias_E, mask_T)
    (routed.weights_TK * grad_TK).sum().backward()
    assert given.grad is not None
    return routed, given.grad


def entropy(routed: Chosen, mask_T: Tensor | None) -> Tensor:
    """The sum over routed tokens of the entropy of their shares, written out, and their number."""
    assert routed.scores_TE is not None
    scores_TE = routed.scores_TE.detach().double()
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    entropy_T = -(shares_TE * shares_TE.log()).nan_to_num().sum(-1)
    valid_T = torch.ones(len(entropy_T)) if mask_T is None else mask_T.double()
    return torch.stack(((entropy_T * valid_T).sum(), valid_T.sum())).float()


def kernels_as_the_reference(score: str, shape: str) -> None:
    """In fp32, and in fp64 with the same choices: no further from it than a few last places."""
    tokens, experts, k, groups = SHAPES[shape]
    logits_TE = logits_of((tokens, experts))
    # With the most experts each variant takes seconds: only that with a bias and a mask there.
    for bias_E, mask_T in islice(variants(tokens, experts), 1 if experts == MOST_EXPERTS else None):
        gating = Gating(k=k, groups=groups, **SCORES[score])
        grad_TK = torch.randn(tokens, k, generator=torch.Generator().manual_seed(2)).mT.contiguous().mT
        mine, my_grad = kernels(logits_TE, gating, bias_E, mask_T, grad_TK)
        right, right_grad = references(logits_TE, gating, bias_E, mask_T, grad_TK)
        assert torch.equal(mine.ids_TK, right.ids_TK)
        assert torch.equal(mine.counts_E, right.counts_E)
        assert mine.ids_TK.dtype == torch.int64
        assert mine.entropy is not None
        torch.testing.assert_close(mine.entropy, entropy(right, mask_T), rtol=1e-5, atol=1e-5)
        assert mine.weights_TK.dtype == mine.counts_E.dtype == torch.float32
        exact, exact_grad = references(logits_TE.double(), gating, bias_E, mask_T, grad_TK)
        if torch.equal(exact.ids_TK, mine.ids_TK):
            right, right_grad = exact, exact_grad
        torch.testing.assert_close(mine.weights_TK, right.weights_TK.float(), rtol=3e-6, atol=1e-30)
        torch.testing.assert_close(my_grad, right_grad.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("score", "shape"), [*each_value(SCORES, list(SHAPES)[:-1]), ("sigmoid", "most"), *DEEP])
def test_the_kernels(interpreter: ProcessPoolExecutor, score: str, shape: str) -> None:
    interpreter.submit(kernels_as_the_reference, score, shape).result()


def equals_by_the_lowest_id() -> None:
    from moefw_kernels.routing import triton

    logits_TE = torch.tensor(
        [
            [1.0, 2.0, 2.0, 1.0, 2.0, 0.0],
            [0.0, -0.0, 0.0, -0.0, 0.0, -0.0],
            [float("-inf"), float("-inf"), -1.0, float("-inf"), float("-inf"), float("-inf")],
            [1.0, float("inf"), float("nan"), float("inf"), 2.0, 0.0],
        ]
    )
    ids_TK = triton.route(logits_TE, Gating(k=4), None, None)[0][0]
    order_TE = logits_TE.nan_to_num(nan=float("inf"), posinf=1e30).sort(dim=-1, descending=True, stable=True).indices
    assert ids_TK.tolist() == order_TE[:, :4].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 0, 1, 3], [2, 1, 3, 4]]
    two_groups = Gating(k=2, groups=(3, 1, 2))
    assert triton.route(torch.zeros(1, 6), two_groups, None, None)[0][0].tolist() == [[0, 1]]


def test_equals_are_chosen_from_the_lowest_id_on(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(equals_by_the_lowest_id).result()


def as_on_a_gpu(score: str) -> None:
    """The operator with its kernels under autograd."""
    Tensor.is_cuda = True  # type: ignore[assignment]
    try:
        for bias_E, mask_T in variants(9, 12):
            gating = Gating(k=3, groups=(4, 2, 1), needs_scores=True, **SCORES[score])
            mine, right = (logits_of((9, 12)).requires_grad_() for _ in range(2))
            for given, of in ((mine, route), (right, reference.route)):
                found = of(given, gating, bias_E, mask_T)
                assert (found.scores_TE is None) == (of is route)
                (found.weights_TK * torch.arange(27.0).view(9, 3)).sum().backward()
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-5, atol=1e-5)
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
            route(mine, gating, None, None)
        assert (12 in {x.shape[-1] for x in held}) == gating.pre_softmax
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("moefw_kernels.routing.triton.route")
            for dtype, experts, k in (
                (torch.float64, 8, 2),
                (torch.float32, MOST_EXPERTS + 1, 2),
                (torch.float32, 64, 33),
            ):
                assert route(torch.randn(2, experts, dtype=dtype), Gating(k=k)).ids_TK.shape == (2, k)
    finally:
        del Tensor.is_cuda


@pytest.mark.parametrize("score", SCORES)
def test_on_a_gpu_the_kernels_route_up_to_their_limits(interpreter: ProcessPoolExecutor, score: str) -> None:
    interpreter.submit(as_on_a_gpu, score).result()


@pytest.mark.parametrize("score", SCORES)
def test_the_reference_in_fp64_has_the_slopes_of_its_weights(score: str) -> None:
    logits_TE = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gating = Gating(k=3, needs_scores=True, **SCORES[score])

    def weights_and_scores(given: Tensor) -> tuple[Tensor, ...]:
        found = reference.route(given, gating, None, None)
        assert found.scores_TE is not None
        return found.scores_TE, reference.weigh(given, found.scores_TE, found.ids_TK, gating)

    assert torch.autograd.gradcheck(weights_and_scores, (logits_TE,))


def test_every_score_has_its_variants() -> None:
    found = {
        (one.get("score", "softmax"), bool(one.get("pre_softmax") or one.get("renormalise"))) for one in SCORES.values()
    }
    assert found == set(product(("softmax", "sigmoid", "sqrtsoftplus"), (False, True)))
