"""The sums over tokens of which balance losses are made, and the Switch loss. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw_kernels.routing.balance import reference
from moefw_kernels.routing.balance.sums import Segments, Sums
from moefw_kernels.routing.gating import Gating
from moefw_kernels.routing.limits import kernels_take

__all__ = ["Segments", "Sums", "switch_loss", "token_sums", "z_loss"]


def token_sums(
    logits_TE: Tensor,
    gating: Gating,
    over: Sequence[Segments | None],
    *,
    scores_TE: Tensor | None = None,
    ids_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
    z_coeff: float | None = None,
) -> tuple[tuple[Sums, ...], Tensor | None]:
    """Sums over each of ``over``, and the z-loss of all tokens times ``z_coeff``, a scalar. T may be 0.

    ``logits_TE`` fp32 or fp64. A token's shares are probabilities: its scores by ``gating.score`` divided by their sum.
    It chooses the ``gating.k`` best of all experts by score, whatever bias or groups limited it, and ``ids_TK`` (int64,
    -1 is none) are these choices if the caller has them. ``mask_T`` (bool, or 0 and 1): tokens that count; None: all.
    ``None`` among ``over`` is one segment of all tokens, whose mass need not be added up in order.

    The z-loss is the sum of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906 eq. 5).

    On a GPU fp32 takes two kernels forward for each of ``over`` and one backward, without atomics. The first stores at
    most T / 32 + G parts of segments, of (2E + 2) fp32 each, and the second adds them up in order. Logits are saved.
    PyTorch operations, which take ``scores_TE`` (with their graph) where a router has made them, are used elsewhere.
    """
    if not kernels_take(logits_TE, gating):
        return reference.token_sums(logits_TE, gating, over, scores_TE, ids_TK, mask_T, z_coeff)
    if not over:
        if z_coeff is None:
            return (), None
        _, _, z = _Sums.apply(logits_TE, gating, ids_TK, mask_T, None, z_coeff)  # type: ignore[no-untyped-call]
        return (), z
    sums = []
    z = None
    for number, segments in enumerate(over):
        # The z-loss is over all tokens, whatever the segments: it comes with the first of them.
        coeff = z_coeff if number == 0 else None
        mass_GE, seen_GX, z_of_pass = _Sums.apply(  # type: ignore[no-untyped-call]
            logits_TE, gating, ids_TK, mask_T, segments or Segments(1), coeff
        )
        sums.append(Sums(mass_GE, seen_GX))
        if number == 0:
            z = z_of_pass
    return tuple(sums), z


def switch_loss(mass_GE: Tensor, seen_GX: Tensor, k: int, coeff: float) -> Tensor:
    """Load-balancing loss of each segment of tokens times its valid tokens, summed, times ``coeff``: a scalar.

    A segment of N valid tokens, of which ``n_e`` choose expert e, adds ``N * E / (K N^2) * sum_e mass_e n_e`` (Switch,
    arXiv 2101.03961 eq. 4-6): 1 for each token if experts are equally loaded. ``seen_GX`` holds n and N. If segments
    are spread over ranks, ``seen_GX`` is the sum over these ranks and ``mass_GE`` is not, and each rank returns its
    part of the loss. A segment without valid tokens adds 0.
    """
    if not kernels_take(mass_GE, Gating(k=k)):
        return reference.switch_loss(mass_GE, seen_GX, k, coeff)
    loss: Tensor = _Switch.apply(mass_GE, seen_GX, coeff * mass_GE.shape[1] / k)  # type: ignore[no-untyped-call]
    return loss


def z_loss(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Sum over valid tokens of ``logsumexp(logits)^2``; ``valid_T`` is 1 for these and 0 for others."""
    z = token_sums(logits_TE, Gating(k=1), (), mask_T=valid_T, z_coeff=1.0)[1]
    assert z is not None
    return z


class _Sums(torch.autograd.Function):
    """Saves the logits, and the segment of each token where it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        gating: Gating,
        ids_TK: Tensor | None,
        mask_T: Tensor | None,
        segments: Segments | None,
        z_coeff: float | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from moefw_kernels.routing.balance import triton

        ctx.save_for_backward(logits_TE, mask_T, None if segments is None else segments.segment_T)
        ctx.score = gating.score
        ctx.count = None if segments is None else segments.count
        ctx.z_coeff = z_coeff
        sums = triton.token_sums(logits_TE, gating, ids_TK, mask_T, segments, z_coeff)
        # The three share one storage. ``data`` hides from autograd that they are views of it: otherwise it would refuse
        # that ranks add up ``seen_GX`` in place.
        mass_GE, seen_GX, z = (None if tensor is None else tensor.data for tensor in sums)
        if seen_GX is not None:
            ctx.mark_non_differentiable(seen_GX)
        ctx.set_materialize_grads(False)
        return mass_GE, seen_GX, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GE: Tensor | None, _: None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        from moefw_kernels.routing.balance import triton

        if grad_GE is None and grad_z is None:
            return None, None, None, None, None, None
        logits_TE, mask_T, segment_T = ctx.saved_tensors
        segments = None if ctx.count is None else Segments(ctx.count, segment_T)
        grad_TE = triton.token_sums_backward(logits_TE, ctx.score, mask_T, segments, ctx.z_coeff, grad_GE, grad_z)
        return grad_TE, None, None, None, None, None


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mass_GE: Tensor, seen_GX: Tensor, coeff: float) -> Tensor:
        from moefw_kernels.routing.balance import triton

        ctx.save_for_backward(seen_GX)
        ctx.coeff = coeff
        return triton.switch_loss(mass_GE, seen_GX, coeff)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from moefw_kernels.routing.balance import triton

        (seen_GX,) = ctx.saved_tensors
        return triton.switch_loss_backward(seen_GX, grad, ctx.coeff), None, None
